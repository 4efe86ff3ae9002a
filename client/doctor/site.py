"""The site's data and the port of its service; the data loads torch."""

from dataclasses import dataclass

from client.residence.places import Places
from client.residence.serving import read_serving
from client.settings import ClientSettings
from client.site.limits import Answers
from knnper.config.address import Address
from knnper.config.errors import DataError
from knnper.data.site.agreement import SiteTask
from knnper.data.site.catalogue import survey_site
from knnper.data.site.check import check_site
from knnper.transport.credentials.files import permission_problem
from knnper.transport.diagnosis.finding import Finding, fine, problem, warning
from knnper.transport.diagnosis.network import connected, encrypted, get
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.files import load_model

_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SERVICE = "/ready"
_STATUS_OF_SERVICE = frozenset({200, 503})


@dataclass(frozen=True)
class Site:
    """What a client has of its own.

    Attributes
    ----------
    settings
        The client.
    """

    settings: ClientSettings

    def data(self) -> Finding:
        """Look whether the data can be read and learned from."""
        look = f"see all about it: knnper data check --config {self.settings.file}"
        try:
            survey = survey_site(
                self.settings.data, self.settings.base, self._known_task()
            )
        except (DataError, OSError) as error:
            return problem(str(error), look)
        checked = check_site(survey)
        counts = ", ".join(
            f"{one.num_examples} {split}" for split, one in checked.splits.items()
        )
        found = f"{counts} examples of {len(checked.class_names)} classes"
        if checked.problems:
            return problem("; ".join(checked.problems), look)
        if checked.warnings:
            return warning(f"{found}; {'; '.join(checked.warnings)}", look)
        return fine(found)

    def limits(self) -> Finding:
        """Look what a run may do here, and how much of it was done."""
        limits, answers = self.settings.limits, Answers(self.settings)
        given = answers.read()
        allowed = [
            f"{'any' if names is None else ', '.join(names) or 'no'} {kind}"
            for names, kind in ((limits.methods, "method"), (limits.models, "model"))
        ]
        only = limits.experiment
        parts = [
            f"behind an update at least {limits.min_examples} examples, "
            f"{limits.min_steps} step(s)",
            *allowed,
            "any experiment" if only is None else f"the experiment {only[:16]} alone",
            f"training rounds: {answers.state('training', given)}",
            f"answers with metrics: {answers.state('validation', given)}"
            if self.settings.share_metrics
            else "no metrics",
        ]
        found = "; ".join(parts)
        if not self.settings.train:
            return fine(f"no training; {found}")
        if answers.left("training", given) < 1:
            advice = "raise limits.training_rounds, or wait until its days are over"
            return warning(f"no training round is left: {found}", advice)
        return fine(found)

    def service(self) -> Finding:
        """Look whether the service's port is free, or is the service's."""
        chosen = self.settings.service
        if chosen.port == 0:
            return fine("takes any free port")
        host = _UNSPECIFIED.get(chosen.host, chosen.host)
        where = Address(host, chosen.port)
        opened = connected if chosen.tls is None else encrypted
        try:
            with connected(where):
                pass
        except OSError:
            return self._token() or fine(f"{where} is free; start it: knnper serve")
        try:
            with opened(where) as connection:
                answer = get(connection, where, _SERVICE)
        except OSError:
            return _taken(where)
        if answer.status not in _STATUS_OF_SERVICE:
            return _taken(where)
        return self._token() or fine(f"runs at {where}")

    def _token(self) -> Finding | None:
        token = self.settings.state / "token"
        exposed = permission_problem(token) if token.exists() else None
        if exposed is None:
            return None
        found, _, advice = exposed.partition("; ")
        return problem(found, advice, "mode 0600; knnper serve refuses any other")

    def _known_task(self) -> SiteTask | None:
        """Return what the installed model was trained on; None without one."""
        places = Places(self.settings.state)
        try:
            serving = read_serving(places.serving)
            if serving is None:
                return None
            return load_model(places.model(serving.model)).card.learned
        except ModelError:
            return None


def _taken(where: Address) -> Finding:
    return problem(
        f"other software has {where}",
        "end it, or set `service.port` to a free port",
        "a free port, or this client's service",
    )
