"""The checks of ``knnper site doctor``: they change nothing and disturb nothing."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from http import HTTPStatus
from pathlib import Path

import httpx
from cryptography import x509
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.activation import Activation, holder
from knnper.client.data_changes import find_changes
from knnper.client.limits import REFUSALS, Answers, last_refusal
from knnper.client.settings import ClientSettings
from knnper.client.state import (
    Offered,
    SiteStateError,
    StateFolder,
    pending_serving,
    read_serving,
    require_own,
)
from knnper.data.site import survey_site
from knnper.data.site_check import check_site
from knnper.data.site_data import SiteData, SiteTask
from knnper.datastore.examples import StoreError
from knnper.datastore.store import DATABASE, StoreReader, open_store
from knnper.errors import CredentialError, DataError, OwnCodeError
from knnper.files import is_private
from knnper.own import Door
from knnper.settings import Own
from knnper.strategies.catalogue import KINDS
from knnper.strategies.core.exported_model import (
    ModelError,
    read_model,
    require_fingerprint,
)
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    authority_problem,
    expires_soon,
    expiry_problem,
    fingerprint,
    host_problem,
    hosts_of,
    parse_address,
    permission_problem,
    read_certificate,
    read_node_key,
    replaced_keys,
)
from knnper.transport.diagnosis import (
    IMPOSSIBLE_PAUSE_S,
    TIMEOUT_S,
    Check,
    Finding,
    HttpAnswer,
    NotHttpError,
    Standing,
    Verdict,
    connected,
    encrypted,
    fine,
    folder_finding,
    from_message,
    gateway_versions,
    get,
    own_versions,
    plain_answer,
    problem,
    skipped,
    speaks_tls,
    standing_in,
    version_finding,
    warning,
)

GATEWAY = "the federation's gateway"  # what was expected where other software answers
_CONTROL = f"{flower.CONTROL}list-nodes"
_CORRECT_SERVER = "correct `server`: it is `listen` of the server's settings"
_START_NODE = "start it: knnper fed client; the server accepts it within a minute"
_GET_MODEL_AGAIN = (
    "have the run distribute it again (start knnper fed client), or bring it: knnper "
    "site onboard --model FOLDER"
)
# A warning comes before Flower's own limits of clock differences are reached.
_NOTABLE_AHEAD_S, _NOTABLE_BEHIND_S = 2.0, 60.0
# Flower takes a node for offline after two missed heartbeats, 30 s apart.
_OFFLINE_AFTER_S = 60.0
# OpenSSL's codes of problems of the certificate itself: not yet valid, expired, and
# mismatches of the host name, e-mail or address.
_NOT_OF_AUTHORITY = frozenset({9, 10, 62, 63, 64})


def client_checks(settings: ClientSettings) -> Iterator[Check]:
    """Yield the checks of a client, in the order in which to fix problems."""
    ca = settings.tls.ca if settings.tls else None
    yield from server_checks(settings.server, ca)
    if ca is not None and settings.key is not None:
        key = _KeyChecks(settings, settings.key, ca)
        yield Check("key", key.check_file)
        # A server that is not authenticated gets no signature.
        yield Check(
            "registration", key.check_registration, ("key", "certificate", "clock")
        )
    site = _SiteChecks(settings)
    yield Check("folder", site.check_folder)
    yield Check("node", site.check_node, ("folder",))
    yield Check("refusals", site.check_refusals, ("folder",))
    yield Check("limits", site.check_limits)
    yield Check("own code", site.check_own_code)
    yield Check("data", site.check_data)
    yield Check("model", site.check_models, ("folder",))
    yield Check("memory", site.check_memory, ("model",))
    yield Check("service", site.check_service)


def server_checks(address: str, ca: Path | None) -> Iterator[Check]:
    """Yield the checks of a server as a client reaches it; without TLS if no ``ca``."""
    server = _ServerChecks(address, ca is not None)
    yield Check("server", server.check_connection)
    yield Check("tls", server.check_tls, ("server",))
    yield Check("gateway", server.check_gateway, ("tls",))
    yield Check("clock", server.check_clock, ("gateway",))
    yield Check("version", server.check_version, ("gateway",))
    if ca is not None:
        yield Check("certificate", lambda: server.check_certificate(ca), ("gateway",))


class _ServerChecks:
    def __init__(self, address: str, with_tls: bool) -> None:
        self.address, self._with_tls = parse_address(address), with_tls

    def check_connection(self) -> Finding:
        address = self.address
        try:
            with connected(address):
                return fine(f"{address} takes connections")
        except (socket.gaierror, UnicodeError) as error:
            return problem(
                f"the name {address.host} cannot be resolved ({error})",
                "correct `server`, fix this machine's DNS, or use /etc/hosts",
            )
        except ConnectionRefusedError:
            message = f"nothing listens at {address}"
            fix = "start the server there (knnper fed server)"
        except TimeoutError:
            message = f"{address} did not answer within {TIMEOUT_S:g} s"
            fix = f"let TCP port {address.port} through the firewalls on the way"
        except OSError as error:
            message = f"{address} cannot be reached ({error.strerror or error})"
            fix = "fix this machine's network or route"
        return problem(message, f"{fix}, or {_CORRECT_SERVER}")

    def check_tls(self) -> Finding:
        tls_error = ""
        if self._with_tls:
            try:
                with encrypted(self.address) as connection:
                    return fine(f"{self.address} speaks {connection.version()}")
            except OSError as error:
                tls_error = f" ({error})"
        speaks_http = plain_answer(self.address, flower.HEALTH) is not None
        if self._with_tls and speaks_http:
            return problem(
                f"{self.address} speaks HTTP without TLS",
                f"have the server started with `tls` in its settings, or "
                f"{_CORRECT_SERVER}; without TLS, the client needs `insecure: true` in "
                "place of `tls` and `key`",
                "TLS, since the client's settings have `tls`",
            )
        if speaks_http:
            return warning(
                "nothing is encrypted or authenticated: `insecure: true`",
                "give `tls` and `key`, which the operator makes with: knnper fed init",
            )
        if not self._with_tls and speaks_tls(self.address):
            return problem(
                f"{self.address} speaks TLS",
                "remove `insecure: true`, and give `tls` and `key`, which the operator "
                "makes with: knnper fed add-client",
                "no TLS, since the client's settings have `insecure: true`",
            )
        return self._other_software(f"neither HTTP nor TLS{tls_error}")

    def check_gateway(self) -> Finding:
        try:
            health = self.health
        except (NotHttpError, OSError) as error:
            return self._other_software(f"it does not answer in HTTP ({error})")
        is_gateway = bool(gateway_versions(health.headers))
        is_ok = health.status == HTTPStatus.OK
        if is_gateway and is_ok:
            return fine(f"{self.address} is a federation's gateway")
        if is_gateway:
            return problem(
                f"the gateway at {self.address} answers, and Flower behind it does not "
                f"(HTTP status {health.status})",
                "wait a minute; then the operator reads superlink.log in the server's "
                "state folder (knnper fed doctor FEDERATION)",
            )
        if self._get(_CONTROL).status == HTTPStatus.METHOD_NOT_ALLOWED:
            return problem(
                f"{self.address} is Flower's own port, through which anyone who "
                "reaches it can run code on every client",
                f"{_CORRECT_SERVER}, not of `control`; a SuperLink without `knnper "
                "fed server` needs a gateway in front of it",
                "the gateway's port",
            )
        if is_ok:
            return warning(
                f"{self.address} answers, and is no gateway of knnper's",
                f"if it is not your own proxy: {_CORRECT_SERVER}",
            )
        return self._other_software(
            f"{flower.HEALTH} gives HTTP status {health.status}"
        )

    def check_clock(self) -> Finding:
        ahead_s = self.health.seconds_ahead()
        if ahead_s is None:
            return skipped("the server does not send its time")
        if -_NOTABLE_BEHIND_S < ahead_s < _NOTABLE_AHEAD_S:
            return fine(f"within {max(abs(ahead_s), 0.5):.1f} s of the server's")
        most_behind_s = flower.AGO_S + flower.AHEAD_S
        is_accepted = -most_behind_s < ahead_s < flower.AHEAD_S
        direction = "ahead of" if ahead_s > 0 else "behind"
        return Finding(
            Verdict.WARNING if is_accepted else Verdict.PROBLEM,
            f"this machine's clock is {abs(ahead_s):.1f} s {direction} the server's",
            f"at most {flower.AHEAD_S} s ahead, and {most_behind_s} s behind: Flower "
            "rejects signatures of another time",
            "set the clocks of both machines by NTP (timedatectl set-ntp true)",
        )

    def check_version(self) -> Finding:
        return version_finding(own_versions(), gateway_versions(self.health.headers))

    def check_certificate(self, ca: Path) -> Finding:
        try:
            authority = read_certificate(ca)
        except CredentialError as error:
            return problem(
                str(error), "copy the federation's ca.crt there, or correct `tls.ca`"
            )
        if (expired := expiry_problem(authority, datetime.now(UTC))) is not None:
            return problem(
                f"of the authority, {expired.partition('; ')[0]}",
                "make a new federation folder, and copy its files to all machines",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca)
        try:
            with encrypted(self.address, context) as connection:
                certificate = _peer_certificate(connection)
        except ssl.SSLCertVerificationError as error:
            return self._explain_rejection(authority, error)
        soon = expires_soon(certificate, datetime.now(UTC))
        if soon is not None:
            return from_message(Verdict.WARNING, soon)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        return fine(f"for {', '.join(hosts_of(certificate))}, valid until {until}")

    @cached_property
    def health(self) -> HttpAnswer:
        """The answer to a health request; the server is not authenticated."""
        return self._get(flower.HEALTH)

    def _get(self, path: str) -> HttpAnswer:
        opened = encrypted if self._with_tls else connected
        with opened(self.address) as connection:
            return get(connection, self.address, path)

    def _other_software(self, symptom: str) -> Finding:
        host, port = self.address.host, self.address.port
        return problem(
            f"other software has the port {port} of {host}: {symptom}",
            _CORRECT_SERVER,
            GATEWAY,
        )

    def _explain_rejection(
        self, authority: x509.Certificate, error: ssl.SSLCertVerificationError
    ) -> Finding:
        """Name all problems of a certificate; TLS rejects it for the first one."""
        with encrypted(self.address) as connection:
            certificate = _peer_certificate(connection)
        messages = []
        now = datetime.now(UTC)
        server_now = now - timedelta(seconds=self.health.seconds_ahead() or 0.0)
        expired = expiry_problem(certificate, now)
        if expired is not None and expiry_problem(certificate, server_now) is None:
            messages.append(
                f"the certificate is not valid at {now:%Y-%m-%d %H:%M} UTC, which is "
                "this machine's time, and valid at the server's; set this machine's "
                "clock"
            )
        elif expired is not None:
            messages.append(expired)
        if wrong_host := host_problem(certificate, self.address.host):
            messages.append(wrong_host)
        other = authority_problem(certificate, authority)
        if other is not None and error.verify_code not in _NOT_OF_AUTHORITY:
            messages.append(other)
        parts = [message.partition("; ") for message in messages] or [
            (
                f"the certificate is not accepted ({error.verify_message})",
                "; ",
                "have the operator renew it: knnper fed renew",
            )
        ]
        return problem(
            "; ".join(message for message, _, _ in parts),
            "; ".join(fix for *_, fix in parts),
        )


def _peer_certificate(connection: ssl.SSLSocket) -> x509.Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise ssl.SSLError("the server shows no certificate")
    return x509.load_der_x509_certificate(der)


class _KeyChecks:
    def __init__(self, settings: ClientSettings, key: Path, ca: Path) -> None:
        self._settings, self._key, self._ca = settings, key, ca

    def check_file(self) -> Finding:
        try:
            key = read_node_key(self._key)
        except CredentialError as error:
            return problem(
                str(error),
                "bring back the key that the operator sent, or correct `key`; a new "
                "key has to be registered: knnper fed register FEDERATION "
                f"{self._settings.name} {self._key.name}.pub",
            )
        exposed = permission_problem(self._key)
        if exposed is not None:
            return from_message(Verdict.WARNING, exposed, "mode 0600")
        return fine(f"{fingerprint(key.public_key())} ({self._key})")

    def check_registration(self) -> Finding:
        """Ask for an activation that Flower rejects before it changes anything.

        Flower verifies the signature and looks the key up first, so its error code
        shows whether it knows the key.
        """
        key = read_node_key(self._key)
        request = ActivateNodeRequest(
            public_key=flower.public_pem(key.public_key()),
            heartbeat_interval=IMPOSSIBLE_PAUSE_S,
        )
        try:
            with flower.http_client(self._settings.server, self._ca) as client:
                response = flower.post(
                    client, flower.ACTIVATE, request, flower.signed_headers(key)
                )
        except httpx.HTTPError:
            return problem(
                "the server did not answer", "try again, and read the server's log"
            )
        error = flower.FlowerError.of(response.text)
        reason = error.extra or error.detail
        if error.code == flower.NOT_ACCEPTED:
            public, name = f"{self._key.name}.pub", self._settings.name
            return problem(
                f"the key {fingerprint(key.public_key())} is not registered with the "
                "server, or no longer",
                f"send {public} to the federation's operator, who runs: knnper fed "
                f"register FEDERATION {name} {public}. A key that was removed cannot "
                "come back: make a new one",
            )
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            return problem(
                f"the server does not accept the key's signature: {reason}",
                "set both clocks; if they agree, have the key registered again",
            )
        if error.code != flower.BAD_HEARTBEAT:
            return problem(
                "the server's answer cannot be understood (HTTP status "
                f"{response.status_code}): {reason}",
                "install the same versions on both sides",
            )
        return self._judge_standing(standing_in(response.text))

    def _judge_standing(self, standing: Standing | None) -> Finding:
        """Judge what the gateway knows of the key: its name and last activity."""
        state, name = self._settings.state, self._settings.name
        process = holder(state)
        if standing is None or standing.name is None:
            return fine("the server knows the key; it sends no name")
        if standing.name != name:
            return problem(
                f"the key is registered as {standing.name}, and `name` is {name}",
                f"set `name: {standing.name}`, or use the key of {name}: a name is one "
                "key",
            )
        if process is not None:
            return fine(f"registered as {name}, and its node runs ({process})")
        if standing.idle_s is None or standing.idle_s >= _OFFLINE_AFTER_S:
            return fine(f"registered as {name}")
        heard = f"{standing.idle_s:.0f} s ago the server heard of a node with this key"
        if _did_not_leave(state):
            return warning(
                f"{heard}, maybe the one of {state}, which did not leave in order",
                _START_NODE,
            )
        return problem(
            f"{heard}, which does not run from {state}",
            "stop the other node: a second one is rejected while the first is online. "
            "For another client, make another key: knnper fed add-client",
            "no other node with this client's name and key",
        )


def _did_not_leave(state: Path) -> bool:
    try:
        return Activation.of(state).left_behind() is not None
    except OSError:  # the folder was never locked
        return False


class _SiteChecks:
    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._folder = StateFolder(settings.state)

    def check_folder(self) -> Finding:
        """Check that the state folder is writable, this client's, and private."""
        path, settings = self._folder.path, self._settings
        finding = folder_finding(path, "state")
        if finding.verdict is Verdict.PROBLEM or not path.exists():
            return finding
        key, replaced = None, frozenset[str]()
        if settings.key is not None:
            # The check of the key reports a file that cannot be read.
            with contextlib.suppress(CredentialError):
                key = fingerprint(read_node_key(settings.key).public_key())
                replaced = replaced_keys(settings.key)
        require_own(self._folder, settings.name, key, replaced)
        if not is_private(path):
            return warning(
                f"other users can look into {path}, which holds examples",
                f"chmod 700 {path}",
                "mode 0700",
            )
        return finding

    def check_node(self) -> Finding:
        process = holder(self._folder.path)
        if process is not None:
            return fine(f"runs (process {process})")
        if _did_not_leave(self._folder.path):
            return warning(
                "does not run, and did not leave in order before", _START_NODE
            )
        return fine("does not run; start it with: knnper fed client")

    def check_refusals(self) -> Finding:
        refusal = last_refusal(self._folder.path)
        if refusal is None:
            return fine("none was recorded")
        at = f"at {refusal.time:%Y-%m-%d %H:%M} UTC"
        serving = read_serving(self._folder.serving)
        if serving is not None and serving.installed > refusal.time.timestamp():
            return fine(f"the last one, {at}, is older than the model")
        if refusal.about == "model":
            return problem(
                f"{at}, {refusal.reason}",
                "install the same versions on both sides, and distribute it again",
                "the fingerprint that the server announced",
            )
        if refusal.about == "run":
            return warning(
                f"{at}, this site refused a run: {refusal.reason}",
                "to take part, change client.yaml; or ask for another experiment",
            )
        return warning(
            f"{at}, the server refused this client: {refusal.reason}",
            f"once that is fixed, remove {self._folder.path / REFUSALS}",
        )

    def check_limits(self) -> Finding:
        """Show what a run may do to this site, and how many answers are left."""
        settings, answers = self._settings, Answers(self._settings)
        limits, given = settings.limits, answers.read()
        methods, models = (
            "any" if names is None else ", ".join(names) or "no"
            for names in (limits.methods, limits.models)
        )
        experiment = limits.experiment
        metrics = f"answers with metrics: {answers.summary('validation', given)}"
        summary = "; ".join(
            (
                f"behind an update at least {limits.min_examples} examples, "
                f"{limits.min_steps} step(s)",
                f"{methods} method",
                f"{models} model",
                f"the experiment {experiment[:16]} alone"
                if experiment
                else "any experiment",
                f"training rounds: {answers.summary('training', given)}",
                metrics if settings.share_metrics else "no metrics",
            )
        )
        if not settings.train:
            return fine(f"no training; {summary}")
        if answers.num_left("training", given) < 1:
            return warning(
                f"no training round is left: {summary}",
                "raise limits.training_rounds, or wait until its days are over",
            )
        return fine(summary)

    def check_own_code(self) -> Finding:
        door = self._settings.door
        pretrained = door.pretrained or {}
        missing = [str(path) for path in pretrained.values() if not path.exists()]
        if missing:
            return problem(
                f"there is no {', '.join(missing)}",
                "put it there, or correct `pretrained`",
            )
        try:
            own_code = {name: _open_own(door, name) for name in door.allowed or ()}
        except OwnCodeError as error:
            return problem(
                str(error),
                "put it there, or correct `own_code`",
                "the code that own_code.allowed names",
            )
        names = [
            f"{name} {code.fingerprint[:12]}".strip() for name, code in own_code.items()
        ]
        return fine("; ".join([*names, *pretrained]) or "an experiment may use none")

    def check_data(self) -> Finding:
        fix = f"see all details: knnper site check {self._settings.file}"
        try:
            survey = self._survey
        except (DataError, OSError) as error:
            return problem(str(error), fix)
        report = check_site(survey)
        counts = ", ".join(
            f"{checked.num_examples} {split}"
            for split, checked in report.splits.items()
        )
        summary = f"{counts} examples of {len(report.class_names)} classes"
        if report.problems:
            return problem("; ".join(report.problems), fix)
        if report.warnings:
            return warning(f"{summary}; {'; '.join(report.warnings)}", fix)
        return fine(summary)

    def check_models(self) -> Finding:
        """Check that the served model exists, and the fingerprint of each model."""
        serving, models = read_serving(self._folder.serving), self._folder.models
        if serving is None:
            return skipped("no model is installed yet")
        if not self._folder.model(serving.model).is_dir():
            return problem(f"{serving.model[:12]} is not in {models}", _GET_MODEL_AGAIN)
        damaged = []
        for path in sorted(models.iterdir()):
            try:
                if not path.name.startswith("."):
                    require_fingerprint(read_model(path), path.name, str(path))
            except ModelError as error:
                damaged.append(str(error))
        if damaged:
            return problem(
                "; ".join(damaged),
                f"remove the damaged models from {models}, and {_GET_MODEL_AGAIN}",
                "models as their folders are named",
            )
        return fine(f"{serving.model[:12]} of {serving.run}; its fingerprint is right")

    def check_memory(self) -> Finding:
        """Check that the served model embedded the memory, and compare it with data."""
        path = self._folder.store
        if not (path / DATABASE).is_file():
            return warning(
                f"there is no memory in {path}",
                "knnper site onboard fills one; knnper site serve begins an empty one",
            )
        try:
            with open_store(path) as store:
                embedded_by, count = store.fingerprint, len(store)
                changes = self._describe_changes(store)
        except StoreError as error:
            return problem(
                str(error), f"see what can be read: knnper store verify {path}"
            )
        summary = f"{count} examples, embedded by the model {embedded_by[:12]}"
        pending = pending_serving(self._folder)
        if pending is not None and embedded_by == pending.model:
            return fine(f"{summary}, which is about to be served")
        serving = read_serving(self._folder.serving)
        if serving is not None and embedded_by != serving.model:
            return problem(
                summary,
                "start knnper site serve, which re-embeds them",
                f"the model that is served, {serving.model[:12]}",
            )
        if changes:
            return warning(
                f"{summary}; the data has changed since: {changes}",
                f"knnper site refresh {self._settings.file}",
            )
        return fine(summary)

    def check_service(self) -> Finding:
        binding = self._settings.service
        if binding.port == 0:
            return fine("takes any free port")
        address = binding.address.on_this_machine
        opened = connected if binding.tls is None else encrypted
        try:
            with connected(address):
                pass
        except OSError:
            free = fine(f"{address} is free; start it: knnper site serve")
            return self._exposed_token() or free
        with contextlib.suppress(OSError), opened(address) as connection:
            if get(connection, address, "/ready").status in (200, 503):
                return self._exposed_token() or fine(f"runs at {address}")
        return problem(
            f"other software has {address}",
            "end it, or set `service.port` to a free port",
            "a free port, or this client's service",
        )

    def _exposed_token(self) -> Finding | None:
        token = self._folder.path / "token"
        exposed = permission_problem(token) if token.exists() else None
        if exposed is None:
            return None
        expected = "mode 0600; knnper site serve rejects any other"
        return from_message(Verdict.PROBLEM, exposed, expected)

    def _describe_changes(self, store: StoreReader) -> str:
        """Describe how the data differs from the memory; "" if it cannot be read."""
        try:
            changes = find_changes(store, Offered(self._folder), self._survey)
        except (DataError, SiteStateError, OSError):
            return ""
        return str(changes) if changes else ""

    @cached_property
    def _survey(self) -> SiteData:
        settings = self._settings
        return survey_site(settings.data, settings.base, self._model_task())

    def _model_task(self) -> SiteTask | None:
        serving = read_serving(self._folder.serving)
        with contextlib.suppress(ModelError):
            if serving is not None:
                return read_model(self._folder.model(serving.model)).card.learned
        return None


def _open_own(door: Door, name: str) -> Own:
    """Open a site's own code, of whichever kind it is."""
    errors = []
    for kind in KINDS.values():
        try:
            return door.open(name, kind)
        except OwnCodeError as error:
            errors.append(error)
    raise errors[0]
