"""The checks of ``knnper site doctor``: nothing is changed or disturbed."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx
from cryptography import x509
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.data_changes import DataChanges, find_changes
from knnper.client.flower_node import Activation, holder
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
from knnper.experiment import Own
from knnper.files import is_private
from knnper.own import Door
from knnper.strategies.catalogue import KINDS
from knnper.strategies.core.exported_model import (
    ModelError,
    read_model,
    require_fingerprint,
)
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    Address,
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
    Answer,
    Check,
    Finding,
    NotHttpError,
    Standing,
    Verdict,
    connected,
    encrypted,
    fine,
    folder_finding,
    get,
    own_versions,
    plain_answer,
    problem,
    skipped,
    speaks_tls,
    standing_in,
    told,
    told_versions,
    version_finding,
    warning,
)

_HEALTH, _CONTROL = "/health", "/v1/control/list-nodes"
GATEWAY = "the federation's gateway"
_CORRECT = "correct `server`: it is HOST:PORT of `listen` in the server's settings"
_AGAIN = (
    "have the run distribute it again (start knnper fed client), or bring it: knnper "
    "site onboard --model FOLDER"
)
_START = "start it: knnper fed client; the server lets it in within a minute"
# A part of what Flower bears, so that a warning comes before the refusal.
_NOTABLE_AHEAD_S, _NOTABLE_BEHIND_S = 2.0, 60.0
# After two missed signs of life, 30 s apart, Flower takes a node for gone.
_FORGOTTEN_S = 60.0
# OpenSSL's numbers of what is wrong with the certificate itself.
_NOT_OF_AUTHORITY = frozenset({9, 10, 62, 63, 64})
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def client_checks(settings: ClientSettings) -> Iterator[Check]:
    """Yield the checks of a client in order."""
    ca, site = settings.tls.ca if settings.tls else None, _Site(settings)
    yield from server_checks(settings.server, ca)
    if ca is not None and settings.key is not None:
        key = _Key(settings, settings.key, ca)
        yield Check("key", key.is_readable)
        # Nothing is signed for a server that is not known.
        known = ("key", "certificate", "clock")
        yield Check("registration", key.is_registered, known)
    yield Check("folder", lambda: folder_finding(settings.state, "state"))
    yield Check("owner", site.folder_is_own, ("folder", "key"))
    yield Check("privacy", site.folder_is_private, ("folder",))
    yield Check("node", site.node, ("folder",))
    yield Check("refusals", site.last_refusal, ("folder",))
    yield Check("limits", site.limits)
    yield Check("own code", site.own_code)
    yield Check("data", site.data)
    yield Check("model", site.models, ("folder",))
    yield Check("memory", site.memory, ("model",))
    yield Check("service", site.service)


def _opened(door: Door, reference: str) -> Own:
    """Return what a site's own file allows, whatever an experiment may take it for."""
    errors = []
    for kind in KINDS.values():
        try:
            return door.open(reference, kind)
        except OwnCodeError as error:
            errors.append(error)
    raise errors[0]


def server_checks(address: str, ca: Path | None) -> Iterator[Check]:
    """Yield those of a server as a client reaches it; without ``ca``, without TLS."""
    server = _Server(address, ca)
    yield Check("address", server.name_resolves)
    yield Check("proxy", server.no_proxy_is_between, ("address",))
    yield Check("port", server.port_is_open, ("address",))
    yield Check("tls", server.tls_is_agreed, ("port",))
    yield Check("gateway", server.gateway_answers, ("tls",))
    yield Check("clock", server.clocks_agree, ("gateway",))
    yield Check("version", server.versions_agree, ("gateway",))
    if ca is not None:
        yield Check("authority", lambda: server.authority_is_readable(ca))
        shown = ("gateway", "authority")
        yield Check("certificate", lambda: server.certificate_is_accepted(ca), shown)


class _Server:
    def __init__(self, address: str, ca: Path | None) -> None:
        self.address, self._with_tls = parse_address(address), ca is not None

    def name_resolves(self) -> Finding:
        host, port = self.address.host, self.address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            mend = "correct `server`, mend this machine's DNS, or use /etc/hosts"
            return problem(f"the name {host} cannot be resolved ({error})", mend)
        addresses = sorted({str(entry[4][0]) for entry in found})
        if addresses == [host]:
            return fine(f"{host} needs no name server")
        return fine(f"{host} is {', '.join(addresses)}")

    def no_proxy_is_between(self) -> Finding:
        proxies, host = getproxies(), self.address.host
        proxy = proxies.get("https" if self._with_tls else "http") or proxies.get("all")
        if proxy is None or proxy_bypass(host):
            return fine("none between this machine and the server")
        return warning(
            f"the environment names the proxy {proxy}: Flower's node goes by way of "
            "it, and the other checks here do not",
            f"unless the server is only reached that way: export NO_PROXY={host}",
        )

    def port_is_open(self) -> Finding:
        where = self.address
        try:
            with connected(where):
                return fine(f"{where} takes connections")
        except ConnectionRefusedError:
            found = f"nothing listens at {where}"
            mend = "start the server there (knnper fed server)"
        except TimeoutError:
            found = f"{where} did not answer within {TIMEOUT_S:g} s"
            mend = f"let TCP port {where.port} through the firewalls on the way"
        except OSError as error:
            found = f"{where} cannot be reached ({error.strerror or error})"
            mend = "mend this machine's network or route"
        return problem(found, f"{mend}, or {_CORRECT}")

    def tls_is_agreed(self) -> Finding:
        refused = ""
        if self._with_tls:
            try:
                with encrypted(self.address) as connection:
                    return fine(f"{self.address} speaks {connection.version()}")
            except OSError as error:
                refused = f" ({error})"
        speaks_http = plain_answer(self.address, _HEALTH) is not None
        if self._with_tls and speaks_http:
            return problem(
                f"{self.address} speaks HTTP without TLS",
                f"have the server started with `tls` in its settings, or {_CORRECT}; "
                "without TLS, the client needs `insecure: true` in place of `tls` and "
                "`key`",
                "TLS, since the client's settings have `tls`",
            )
        if speaks_http:
            found = "nothing is encrypted, nobody proves who they are: `insecure: true`"
            mend = (
                "give `tls` and `key`, which the operator makes with: knnper fed init"
            )
            return warning(found, mend)
        if not self._with_tls and speaks_tls(self.address):
            return problem(
                f"{self.address} speaks TLS",
                "remove `insecure: true`, and give `tls` and `key`, which the operator "
                "makes with: knnper fed add-client",
                "no TLS, since the client's settings have `insecure: true`",
            )
        return self._other_software(f"neither HTTP nor TLS{refused}")

    def gateway_answers(self) -> Finding:
        try:
            health = self.health
        except (NotHttpError, OSError) as error:
            return self._other_software(f"it does not answer in HTTP ({error})")
        is_gateway, is_ok = told_versions(health.headers), health.status == 200
        if is_gateway and is_ok:
            return fine(f"{self.address} is a federation's gateway")
        if is_gateway:
            return problem(
                f"the gateway at {self.address} answers, and Flower behind it does not "
                f"(HTTP status {health.status})",
                "wait a minute; then the operator looks into superlink.log in the "
                "server's state folder (knnper fed doctor FEDERATION)",
            )
        if self._ask(_CONTROL).status == HTTPStatus.METHOD_NOT_ALLOWED:
            return problem(
                f"{self.address} is Flower's own port, where whoever reaches it runs "
                "code on every client",
                f"{_CORRECT}, not of `control`; a SuperLink without `knnper fed "
                "server` needs a gateway in front of it",
                "the gateway's port",
            )
        if is_ok:
            found = f"{self.address} answers, and is no gateway of knnper's"
            return warning(found, f"if it is not your own proxy: {_CORRECT}")
        return self._other_software(f"{_HEALTH} gives HTTP status {health.status}")

    def clocks_agree(self) -> Finding:
        ahead = self.health.seconds_ahead()
        if ahead is None:
            return skipped("the server does not tell its time")
        latest, where = (
            flower.AGO_S + flower.AHEAD_S,
            "ahead of" if ahead > 0 else "behind",
        )
        if -_NOTABLE_BEHIND_S < ahead < _NOTABLE_AHEAD_S:
            return fine(f"within {max(abs(ahead), 0.5):.1f} s of the server's")
        return Finding(
            Verdict.WARNING if -latest < ahead < flower.AHEAD_S else Verdict.PROBLEM,
            f"this machine's clock is {abs(ahead):.1f} s {where} the server's",
            f"at most {flower.AHEAD_S} s ahead, and {latest} s behind: Flower refuses "
            "signatures of another time",
            "set the clocks of both machines by NTP (timedatectl set-ntp true)",
        )

    def versions_agree(self) -> Finding:
        return version_finding(own_versions(), told_versions(self.health.headers))

    def authority_is_readable(self, ca: Path) -> Finding:
        try:
            authority = read_certificate(ca)
        except CredentialError as error:
            copy = "copy the federation's ca.crt there, or correct `tls.ca`"
            return problem(str(error), copy)
        expired = expiry_problem(authority, datetime.now(UTC))
        if expired is not None:
            found = expired.partition("; ")[0]
            advice = "make a new federation folder, and copy its files to all machines"
            return problem(f"of the authority, {found}", advice)
        return fine(f"{authority.subject.rfc4514_string()} ({ca})")

    def certificate_is_accepted(self, ca: Path) -> Finding:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca)
        try:
            with encrypted(self.address, context) as connection:
                certificate = _shown(connection)
        except ssl.SSLCertVerificationError as error:
            return self._why_not(ca, error)
        soon = expires_soon(certificate, datetime.now(UTC))
        if soon is not None:
            return told(Verdict.WARNING, soon)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        return fine(f"for {', '.join(hosts_of(certificate))}, valid until {until}")

    @cached_property
    def health(self) -> Answer:
        """What the server says of itself, whether it is to be trusted or not."""
        return self._ask(_HEALTH)

    def _ask(self, path: str) -> Answer:
        opened = encrypted if self._with_tls else connected
        with opened(self.address) as connection:
            return get(connection, self.address, path)

    def _other_software(self, found: str) -> Finding:
        host, port = self.address.host, self.address.port
        found = f"other software has the port {port} of {host}: {found}"
        return problem(found, _CORRECT, GATEWAY)

    def _why_not(self, ca: Path, error: ssl.SSLCertVerificationError) -> Finding:
        with encrypted(self.address) as connection:
            certificate = _shown(connection)
        other = f"the certificate is not accepted ({error.verify_message}); "
        other += "have the operator renew it: knnper fed renew"
        complaints = list(self._complaints(ca, certificate, error.verify_code))
        parts = [sentence.partition("; ") for sentence in complaints or [other]]
        return problem(
            "; ".join(a for a, _, _ in parts), "; ".join(c for *_, c in parts)
        )

    def _complaints(
        self, ca: Path, certificate: x509.Certificate, code: int
    ) -> Iterator[str]:
        now = datetime.now(UTC)
        ahead = timedelta(seconds=self.health.seconds_ahead() or 0.0)
        expired = expiry_problem(certificate, now)
        if expired is not None and expiry_problem(certificate, now - ahead) is None:
            yield (
                f"the certificate is not valid at {now:%Y-%m-%d %H:%M} UTC, which is "
                "this machine's time, and valid at the server's; set this machine's "
                "clock"
            )
        elif expired is not None:
            yield expired
        if wrong_host := host_problem(certificate, self.address.host):
            yield wrong_host
        other = authority_problem(certificate, read_certificate(ca))
        if other is not None and code not in _NOT_OF_AUTHORITY:
            yield other


def _shown(connection: ssl.SSLSocket) -> x509.Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise ssl.SSLError("the server shows no certificate")
    return x509.load_der_x509_certificate(der)


class _Key:
    def __init__(self, settings: ClientSettings, key: Path, ca: Path) -> None:
        self._settings, self._key, self._ca = settings, key, ca

    def is_readable(self) -> Finding:
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
            return told(Verdict.WARNING, exposed, "mode 0600")
        return fine(f"{fingerprint(key.public_key())} ({self._key})")

    def is_registered(self) -> Finding:
        """Ask the server for what it refuses before it changes anything."""
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
            advice = "try again, and look into the server's log"
            return problem("the server did not answer", advice)
        error = flower.FlowerError.of(response.text)
        code, why = error.code, error.extra or error.detail
        if code == flower.NOT_ACCEPTED:
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
                f"the server does not take the key's signature: {why}",
                "set both clocks; if they agree, have the key registered anew",
            )
        if code != flower.BAD_HEARTBEAT:
            found = f"cannot be understood (HTTP status {response.status_code}): {why}"
            mend = "install the same versions on both sides"
            return problem(f"the server's answer {found}", mend)
        return self._standing(standing_in(response.text))

    def _standing(self, standing: Standing | None) -> Finding:
        state, name = self._settings.state, self._settings.name
        here = holder(state)
        if standing is None or standing.name is None:
            return fine("the server knows the key; it tells no name")
        if standing.name != name:
            return problem(
                f"the key is registered as {standing.name}, and `name` is {name}",
                f"set `name: {standing.name}`, or use the key of {name}: a name is one "
                "key",
            )
        if here is not None:
            return fine(f"registered as {name}, and its node runs ({here})")
        if standing.idle_s is None or standing.idle_s >= _FORGOTTEN_S:
            return fine(f"registered as {name}")
        heard = f"{standing.idle_s:.0f} s ago the server heard of a node with this key"
        if _did_not_leave(state):
            found = f"{heard}, maybe the one of {state}, which did not leave in order"
            return warning(found, _START)
        return problem(
            f"{heard}, which does not run from {state}",
            "stop the other node: a second one is refused while the first is there. "
            "For another client, make another key: knnper fed add-client",
            "no other node with this client's name and key",
        )


def _did_not_leave(folder: Path) -> bool:
    try:
        return Activation.of(folder).left_behind() is not None
    except OSError:  # it was never locked
        return False


class _Site:
    def __init__(self, settings: ClientSettings) -> None:
        self._settings, self._folder = settings, settings.state
        self._state = StateFolder(settings.state)

    def folder_is_own(self) -> Finding:
        if not self._state.identity.exists():
            return fine(f"{self._folder} is nobody's yet")
        name, file = self._settings.name, self._settings.key
        key = None if file is None else fingerprint(read_node_key(file).public_key())
        replaced = () if file is None else replaced_keys(file)
        require_own(self._state, name, key, replaced)
        return fine(f"{self._folder} is that of {name}")

    def folder_is_private(self) -> Finding:
        if not self._folder.exists():
            return fine(f"{self._folder} is yet to be made")
        if is_private(self._folder):
            return fine(f"no other user can look into {self._folder}")
        found = f"other users can look into {self._folder}, which holds examples"
        return warning(found, f"chmod 700 {self._folder}", "mode 0700")

    def node(self) -> Finding:
        process = holder(self._folder)
        if process is not None:
            return fine(f"runs (process {process})")
        if _did_not_leave(self._folder):
            return warning("does not run, and did not leave in order before", _START)
        return fine("does not run; start it with: knnper fed client")

    def last_refusal(self) -> Finding:
        refusal = last_refusal(self._folder)
        if refusal is None:
            return fine("none was noted")
        when = f"{refusal.time:%Y-%m-%d %H:%M} UTC"
        serving = read_serving(self._state.serving)
        if serving is not None and serving.installed > refusal.time.timestamp():
            return fine(f"the last one, of {when}, is older than the model")
        if refusal.about == "model":
            mend = "install the same versions on both sides, and distribute it again"
            expected = "the fingerprint that the server announced"
            return problem(f"at {when}, {refusal.reason}", mend, expected)
        if refusal.about == "run":
            mend = "if it is wanted, change client.yaml; or ask for another experiment"
            return warning(f"at {when}, refused a run: {refusal.reason}", mend)
        mend = f"once that is mended, remove {self._folder / REFUSALS}"
        return warning(f"at {when}, refused by the server: {refusal.reason}", mend)

    def limits(self) -> Finding:
        limits, answers = self._settings.limits, Answers(self._settings)
        given, only = answers.read(), limits.experiment
        validation = f"answers with metrics: {answers.state('validation', given)}"
        method, model = (
            "any" if names is None else ", ".join(names) or "no"
            for names in (limits.methods, limits.models)
        )
        parts = [
            f"behind an update at least {limits.min_examples} examples, "
            f"{limits.min_steps} step(s)",
            *(f"{method} method", f"{model} model"),
            "any experiment" if only is None else f"the experiment {only[:16]} alone",
            f"training rounds: {answers.state('training', given)}",
            validation if self._settings.share_metrics else "no metrics",
        ]
        found = "; ".join(parts)
        if not self._settings.train:
            return fine(f"no training; {found}")
        if answers.left("training", given) < 1:
            advice = "raise limits.training_rounds, or wait until its days are over"
            return warning(f"no training round is left: {found}", advice)
        return fine(found)

    def own_code(self) -> Finding:
        door = self._settings.door
        files = door.pretrained or {}
        if missing := [str(one) for one in files.values() if not one.exists()]:
            mend = "put it there, or correct `pretrained`"
            return problem(f"there is no {', '.join(missing)}", mend)
        try:
            allowed = [(one, _opened(door, one)) for one in door.allowed or ()]
        except OwnCodeError as error:
            mend = "put it there, or correct `own_code`"
            return problem(str(error), mend, "what own_code.allowed names")
        found = [f"{name} {own.fingerprint[:12]}".strip() for name, own in allowed]
        return fine("; ".join([*found, *files]) or "an experiment may use none")

    def data(self) -> Finding:
        settings = self._settings
        look = f"see all about it: knnper site check {settings.file}"
        try:
            survey = self._survey
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

    def models(self) -> Finding:
        serving, folder = read_serving(self._state.serving), self._state.models
        if serving is None:
            return skipped("no model is installed yet")
        if not self._state.model(serving.model).is_dir():
            return problem(f"{serving.model[:12]} is not in {folder}", _AGAIN)
        broken = []
        for one in sorted(folder.iterdir()):
            try:
                if not one.name.startswith("."):
                    require_fingerprint(read_model(one), one.name, str(one))
            except ModelError as error:
                broken.append(str(error))
        if broken:
            mend = f"remove what is damaged from {folder}, and {_AGAIN}"
            return problem("; ".join(broken), mend, "models as their folders are named")
        return fine(f"{serving.model[:12]} of {serving.run}; its fingerprint is right")

    def memory(self) -> Finding:
        serving = read_serving(self._state.serving)
        pending, place = pending_serving(self._state), self._state.store
        if not (place / DATABASE).is_file():
            mend = (
                "knnper site onboard fills one; knnper site serve begins an empty one"
            )
            return warning(f"there is no memory in {place}", mend)
        try:
            with open_store(place) as store:
                embedded_by, count = store.fingerprint, len(store)
                changes = self._changes(store)
        except StoreError as error:
            return problem(str(error), f"see what is left: knnper store verify {place}")
        found = f"{count} examples, embedded by the model {embedded_by[:12]}"
        if pending is not None and embedded_by == pending.model:
            return fine(f"{found}, which is about to be served")
        if serving is not None and embedded_by != serving.model:
            expected = f"the model that is served, {serving.model[:12]}"
            mend = "start knnper site serve, which embeds them anew"
            return problem(found, mend, expected)
        if changes:
            found = f"{found}; the data has changed since: {changes}"
            return warning(found, f"knnper site refresh {self._settings.file}")
        return fine(found)

    def _changes(self, store: StoreReader) -> DataChanges | None:
        """Return how the data differs from the memory; None if it cannot be read."""
        try:
            return find_changes(store, Offered(self._state), self._survey)
        except (DataError, SiteStateError, OSError):
            return None

    @cached_property
    def _survey(self) -> SiteData:
        settings = self._settings
        return survey_site(settings.data, settings.base, self._known_task())

    def service(self) -> Finding:
        chosen = self._settings.service
        if chosen.port == 0:
            return fine("takes any free port")
        where = Address(_UNSPECIFIED.get(chosen.host, chosen.host), chosen.port)
        opened = connected if chosen.tls is None else encrypted
        try:
            with connected(where):
                pass
        except OSError:
            free = f"{where} is free; start it: knnper site serve"
            return self._exposed_token() or fine(free)
        with contextlib.suppress(OSError), opened(where) as connection:
            if get(connection, where, "/ready").status in (200, 503):
                return self._exposed_token() or fine(f"runs at {where}")
        expected = "a free port, or this client's service"
        mend = "end it, or set `service.port` to a free port"
        return problem(f"other software has {where}", mend, expected)

    def _exposed_token(self) -> Finding | None:
        token = self._folder / "token"
        exposed = permission_problem(token) if token.exists() else None
        if exposed is None:
            return None
        expected = "mode 0600; knnper site serve refuses any other"
        return told(Verdict.PROBLEM, exposed, expected)

    def _known_task(self) -> SiteTask | None:
        serving = read_serving(self._state.serving)
        with contextlib.suppress(ModelError):
            if serving is not None:
                return read_model(self._state.model(serving.model)).card.learned
        return None
