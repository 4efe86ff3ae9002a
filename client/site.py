"""A site as a client: its answers to the server, and the files that it keeps.

The text of an error can hold data of the site and goes to the site's own log. The
server gets the codes of `knnper.reasons`: every exception ends in `Discretion.explain`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from knnper.client.flower_node import Deadline
from knnper.client.limits import Limits, note_refusal
from knnper.client.runtime import ClientRuntime, Personalized, Served
from knnper.client.settings import ClientSettings, read_client
from knnper.client.site_state import SiteState
from knnper.client.state_store import ClientStateStore
from knnper.data.examples import ClientData, Examples
from knnper.data.site import open_site
from knnper.data.site_data import SiteData, SitesSettings, SiteTask
from knnper.datastore.memory import KnnSettings
from knnper.errors import (
    ConfigError,
    KnnPerError,
    RefusedError,
    RunError,
    text_for_others,
)
from knnper.experiment import Experiment, from_json, results_identity
from knnper.files import make_private
from knnper.metrics import computations
from knnper.models import build_model, located
from knnper.own import Door, explained
from knnper.predictions import Predictions, require_arrow
from knnper.process import compute_device, keep_freed_memory
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import (
    KINDS,
    Assembly,
    bound,
    site_catalogue,
    task_of_experiment,
    title_of,
)
from knnper.strategies.core.exported_model import (
    ModelError,
    ends_with_global_model,
    global_model,
    require_fingerprint,
)
from knnper.strategies.core.frozen import digest_of, embedded_examples, of_embeddings
from knnper.strategies.core.method import Method
from knnper.strategies.core.task import ClientResults, Evaluation, Validation
from knnper.transport.credentials import fingerprint, read_node_key, replaced_keys
from knnper.transport.flower_protocol import APP_FAILED
from knnper.transport.messages import (
    IN_MESSAGE,
    Carrier,
    Introduction,
    Job,
    introduction_content,
)

OWN_LOG = "the client's own log has the reason"

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Discretion:
    """What of a client's figures and troubles the server learns."""

    share_metrics: bool

    def explain(self, error: Exception, what: str = "personalization") -> str:
        """Log an error in full; return what the server learns of it."""
        # Limits log what they refuse.
        if isinstance(error, RefusedError):
            return text_for_others(error)
        is_known = isinstance(error, KnnPerError | OSError)
        log.error("%s failed: %s", what, error, exc_info=None if is_known else error)
        return text_for_others(error) if self.share_metrics else OWN_LOG

    def update(self, update: Any) -> Any:
        """Return a method's update, without its loss if that is not shared."""
        # The number of examples stays: it is the update's weight in the mean.
        if self.share_metrics:
            return update
        return dataclasses.replace(update, train_loss=math.nan)

    def results(self, results: ClientResults) -> ClientResults:
        """Return who has the model, and how it does there if that is shared."""
        if self.share_metrics:
            return results
        names = tuple(result.client for result in results.results)
        return ClientResults((), results.failures, withheld=names)


def state_of(settings: ClientSettings) -> SiteState:
    """Return the client's site_state, which is that of its name and key alone."""
    if settings.key is None:
        return SiteState(settings.state, settings.name, door=settings.door)
    return SiteState(
        settings.state,
        settings.name,
        fingerprint(read_node_key(settings.key).public_key()),
        settings.door,
        replaced_keys(settings.key),
    )


def installer_of(
    settings: ClientSettings, assembly: Assembly, data: SiteData, expected: str
) -> Callable[[Personalized], Served | None]:
    """Return what installs a model that was distributed."""
    experiment = assembly.experiment
    # As the server decides it, so that who waits for a model gets it.
    has_model = bool(expected) and ends_with_global_model(experiment)

    def keep(personalized: Personalized) -> Served | None:
        if not has_model:
            log.warning("the method ends with no global model, so nothing is served")
            return None
        weights = personalized.reference.weights
        model = global_model(experiment, assembly.task, data.task, weights)
        try:
            require_fingerprint(
                model, expected, "the model that the server distributed"
            )
        except ModelError as error:
            note_refusal(settings.state, "model", str(error))
            raise
        decided = state_of(settings).install(model, data, took_part=personalized.seen)
        told = "the model %s is installed, with a weight of %g for the neighbours"
        log.info(told, model.fingerprint[:12], decided.serving.knn_weight)
        chosen = experiment.personalization
        is_served = isinstance(chosen.settings, KnnSettings)
        if not (assembly.method.serves_global_model and is_served):
            told = (
                "%s makes what is reported; what is served is the model with a memory"
            )
            log.warning(told, title_of(experiment.method.name, chosen.name))
            return None
        return Served(decided.mixed, decided.global_model, decided.chosen)

    return keep


@dataclass(frozen=True)
class SiteWorker:
    """A runtime of one client, with what its site imposes on it."""

    name: str
    runtime: ClientRuntime
    deadline: Deadline
    discretion: Discretion
    limits: Limits
    num_train: int
    trained: list[tuple[int, float]]

    @property
    def method(self) -> Method:
        """What the client does."""
        return self.runtime.method

    def train(
        self,
        client: str,
        payload: object,
        server_round: int,
        state_round: int,
        keep_rounds: Sequence[int],
        counted_round: int = 0,
    ) -> Any:
        """See `ClientRuntime.train`."""
        self._require_this([client])
        self.limits.require_training(self.num_train)
        # Before it is given: a kill cannot make it uncounted.
        self.limits.count("training")
        self.trained.clear()
        with self._doing(f"training in round {server_round}"):
            update = self.runtime.train(
                client, payload, server_round, state_round, keep_rounds, counted_round
            )
        self.limits.require_behind(self.trained)
        return self.discretion.update(update)

    def validate(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object | None = None,
        server_round: int = 0,
        state_rounds: Sequence[int] = (),
    ) -> Validation:
        """See `ClientRuntime.validate`; of no example where metrics are not shared."""
        self._require_this(clients)
        if not self.discretion.share_metrics:
            return Validation(Evaluation(0, 0, 0.0, (), (), ()))
        self.limits.count("validation")
        with self._doing("an evaluation"):
            return self.runtime.validate(
                clients, payload, reference, server_round, state_rounds
            )

    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        state_rounds: Sequence[int],
    ) -> ClientResults:
        """See `ClientRuntime.personalize`; the model is taken, come what may."""
        # Its figures stay here once the site has answered as often as it may.
        self._require_this(clients)
        discretion = self.discretion
        if discretion.share_metrics:
            try:
                self.limits.count("validation")
            except RefusedError:
                discretion = Discretion(share_metrics=False)
        with self._doing("the model distribution"):
            found = self.runtime.personalize(clients, payload, reference, state_rounds)
        predictions = self.runtime.predictions
        if predictions is not None and predictions.has(self.name):
            predictions.merge({self.name: self.name})
            predictions.forget_parts()
            log.info("%s has what is predicted of the test split", predictions.folder)
        return discretion.results(found)

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self.deadline.ends(what):
            yield
        log.info("%s took %.1f s", what, time.monotonic() - began)

    def _require_this(self, clients: Sequence[str]) -> None:
        if list(clients) != [self.name]:
            wanted = ", ".join(clients)
            raise RunError(
                f"the server asked for {wanted}, and this is {self.name}",
                reason=SafeReason(Code.BAD_REQUEST),
            )


KEPT = 4  # runs whose states are kept, so that they can be resumed


def run_states(state: Path, experiment: Experiment, session: str) -> Path:
    """Return the folder of one run, and remove those of runs long past."""
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", session):
        expected = "expected a session of at most 64 letters, digits and -"
        found = f"found {session[:80]!r}"
        reason = SafeReason(Code.BAD_REQUEST)
        raise RunError(f"{expected}, {found}", reason=reason)
    folder = state / "runs" / f"{results_identity(experiment)[:16]}-{session}"
    if folder.exists():
        folder.touch()
    runs = folder.parent
    others = [one for one in runs.iterdir() if one != folder] if runs.is_dir() else []
    others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
    for old in others[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


CONFIG = "config"  # of a node's configuration: names the client's file


@dataclass(frozen=True)
class _SiteSource:
    """The data of the only client of this process."""

    site: SiteData
    train: bool
    embed: Callable[[Examples], Examples] = lambda examples: examples

    def data(self, client: str) -> ClientData:  # noqa: ARG002 (there is one)
        own = self.site.client_data()
        return ClientData(self.embed(own.train), self.embed(own.validation))

    def test(self, client: str) -> Examples:  # noqa: ARG002
        return self.embed(self.site.test.examples)

    def test_names(self, client: str) -> Sequence[str]:  # noqa: ARG002
        return self.site.test.names

    def class_weights(self, client: str) -> None:
        """Return None: a site's own test examples all count the same."""

    def is_seen(self, client: str) -> bool:  # noqa: ARG002
        return self.train


def _embeddings_folder(cache: Path, data: SiteData) -> Path:
    """Return where embeddings of this data are kept; those of former data go."""
    splits = (data.train, data.validation, data.test)
    digests = [digest_of(one.examples.images.numpy()) for one in splits]
    name = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    root = cache / "embeddings"
    for other in root.glob("*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return root / name


class SiteNode:
    """A node with one client, whose data lies at the site."""

    def open(self, context: Context, job: Job) -> SiteWorker:
        """See `knnper.client.client_app.Node`."""
        deadline = Deadline.after(job.timeout_s)
        settings = _settings(context)
        discretion = Discretion(settings.share_metrics)
        # The owner's code may be what reads it, and may hang.
        with deadline.ends("reading the data"):
            experiment, limits = _allowed(settings, job, context.run_id)
            data, task = site_data(settings, experiment)
            trained: list[tuple[int, float]] = []
            device = compute_device(experiment.run)
            whole = task_of_experiment(experiment, task.spec, device)
            learned = dataclasses.replace(
                of_embeddings(whole), on_trained=lambda *found: trained.append(found)
            )
            assembly = bound(experiment, learned)
            source = _SiteSource(data, job.seen and settings.train)
            if learned.spec != whole.spec:
                embed = functools.partial(
                    embedded_examples,
                    task=whole,
                    model=experiment.model,
                    spec=learned.spec,
                    root=_embeddings_folder(settings.cache, data),
                )
                source = dataclasses.replace(source, embed=embed)
            keep_freed_memory()
            states = run_states(settings.state, experiment, job.session)
            wants_predictions = experiment.run.save_predictions
            runtime = ClientRuntime(
                method=assembly.method,
                spec=learned.spec,
                source=source,
                states=ClientStateStore(states),
                key=assembly.key,
                pool=assembly.task.pool,
                keep=installer_of(
                    settings, dataclasses.replace(assembly, task=whole), data, job.model
                ),
                metrics=computations(experiment.run.metrics),
                predictions=Predictions(states) if wants_predictions else None,
                explain=discretion.explain,
            )
        num_train = len(data.train)
        return SiteWorker(
            settings.name, runtime, deadline, discretion, limits, num_train, trained
        )

    def carrier(self, context: Context, job: Job) -> Carrier:  # noqa: ARG002
        """See `knnper.client.client_app.Node`: the server is on another machine."""
        return IN_MESSAGE

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return the client's name and the sizes of its splits."""
        settings = _settings(context)
        name, train = settings.name, settings.train
        if job is None:
            return introduction_content(Introduction(name, train))
        try:
            experiment, limits = _allowed(settings, job, context.run_id)
            data, task = site_data(settings, experiment)
            limits.require_plan(len(data.train))
            _require_model(experiment, task)
        except Exception as error:  # noqa: BLE001 (of the owner's code, too)
            discretion = Discretion(settings.share_metrics)
            problem = discretion.explain(error, "reading the data")
            return introduction_content(Introduction(name, train, problem=problem))
        remark = limits.without_training(len(data.train)) if train else None
        if remark is not None:
            log.warning("%s", remark)
        is_told = settings.share_metrics
        found = Introduction(
            name=name,
            train=train and remark is None,
            num_train=len(data.train),
            num_validation=len(data.validation) if is_told else 0,
            num_test=len(data.test) if is_told else 0,
            remark=str(remark or ""),
        )
        return introduction_content(found)

    def refused(self, context: Context, reason: str) -> None:
        """See `knnper.client.client_app.Node`."""
        settings = _settings(context)
        if note_refusal(settings.state, "client", reason):
            told = "the server refuses this client: %s. Once mended, it is asked again"
            log.error(told, reason)

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        """See `knnper.client.client_app.Node`; the error's text stays here."""
        discretion = Discretion(share_metrics=False)
        # The error may be one of the file in which `share_metrics` is set.
        with contextlib.suppress(KnnPerError, OSError):
            discretion = Discretion(_settings(context).share_metrics)
        kind = message.metadata.message_type
        reason = discretion.explain(error, f"answering a message ({kind})")
        return Message(Error(APP_FAILED, reason), reply_to=message)


def _allowed(settings: ClientSettings, job: Job, run: int) -> tuple[Experiment, Limits]:
    """Return the experiment of a job, and what it may do here; refuse another."""
    experiment = site_experiment(job.experiment, settings.door)
    limits = Limits(settings, experiment, run)
    limits.require_allowed()
    if experiment.run.save_predictions:
        require_arrow()
    return experiment, limits


_OF_OWN_CODE = {f"{section}.name" for section in KINDS}


def site_experiment(text: str, door: Door) -> Experiment:
    """Return the experiment that a job is for, with what is the site's own of it."""
    try:
        found = from_json(text, site_catalogue(door))
    except ConfigError as error:
        if all(one.place in _OF_OWN_CODE for one in error.problems):
            raise RunError(f"the experiment cannot be run here: {error}") from error
        raise RunError(
            "this client has data of its own, and the experiment is not one over data "
            "that stays with the sites; submit it with `knnper fed submit`. If it was, "
            f"the two sides run different versions: {error}",
            reason=SafeReason(Code.NOT_FOR_SITES),
        ) from error
    return dataclasses.replace(found, model=located(found.model, door))


@explained()
def _require_model(experiment: Experiment, task: SiteTask) -> None:
    """Refuse a model that needs files or code that the site has not, or others."""
    chosen = experiment.model
    if chosen.entry is not None or getattr(chosen.settings, "frozen", None):
        # Where no file says what is frozen, it follows from the seed.
        key = RandomKey(experiment.run.seed).child("model")
        build_model(chosen, task.spec, key)


def site_data(
    settings: ClientSettings, experiment: Experiment
) -> tuple[SiteData, SiteTask]:
    """Return the site's data as the experiment needs it."""
    agreed = experiment.data.settings
    if not isinstance(agreed, SitesSettings):
        raise TypeError(f"expected SitesSettings, found {type(agreed).__name__}")
    task = agreed.task()
    # What is read is kept there for the next time.
    make_private(settings.state)
    return open_site(settings.data, settings.base, task, settings.cache), task


def _settings(context: Context) -> ClientSettings:
    path = context.node_config.get(CONFIG)
    if not isinstance(path, str):
        raise RunError(
            "expected the path of the client's file as 'config' in the node's "
            "configuration, found none; start the node with `knnper fed client`, or "
            "with flower-supernode --node-config 'config=\"/path/to/client.yaml\"'"
        )
    return read_client(Path(path))
