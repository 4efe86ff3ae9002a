"""All that is looked at of one client."""

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.flower_node import LOCK_FILE, Activation, holder
from knnper.client.limits import REFUSALS, Answers, last_refusal
from knnper.client.settings import ClientSettings
from knnper.client.state import (
    Places,
    SiteStateError,
    pending_serving,
    read_serving,
    require_own,
)
from knnper.data.site import check_site, survey_site
from knnper.data.site_data import SiteTask
from knnper.datastore.examples import StoreError
from knnper.datastore.store import DATABASE, open_store
from knnper.errors import CredentialError, DataError
from knnper.files import is_private
from knnper.strategies.core.exported_model import (
    ModelError,
    load_model,
    require_fingerprint,
)
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
)
from knnper.transport.diagnosis import (
    IMPOSSIBLE_PAUSE_S,
    TIMEOUT_S,
    Answer,
    Check,
    Finding,
    NotHttpError,
    Standing,
    connected,
    encrypted,
    fine,
    folder_finding,
    get,
    own_versions,
    plain_answer,
    problem,
    problem_told,
    skipped,
    speaks_tls,
    standing_in,
    told_versions,
    version_finding,
    warning,
)
from knnper.transport.flower_protocol import (
    ACTIVATE,
    AGO_S,
    AHEAD_S,
    BAD_HEARTBEAT,
    NOT_ACCEPTED,
    FlowerError,
    http_client,
    post,
    public_pem,
    signed_headers,
)

_HEALTH, _CONTROL = "/health", "/v1/control/list-nodes"
_OK, _CLOSED_TO_GET = 200, 405
GATEWAY = "the federation's gateway"
_CORRECT = "correct `server`: it is HOST:PORT of `listen` in the server's settings"

# A part of what Flower bears, so that a warning comes before the refusal.
_NOTABLE_AHEAD_S, _NOTABLE_BEHIND_S = 2.0, 60.0


class Connection:
    """A server as a client reaches it; each method is a check."""

    def __init__(self, server: str, *, with_tls: bool) -> None:
        self._text = server
        self._with_tls = with_tls

    @cached_property
    def address(self) -> Address:
        """Where the server is."""
        return parse_address(self._text)

    def name_resolves(self) -> Finding:
        """Look whether the server's name stands for an IP address."""
        try:
            host, port = self.address.host, self.address.port
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except ValueError as error:
            return problem(str(error), _CORRECT)
        except (socket.gaierror, UnicodeError) as error:
            return problem(
                f"the name {self.address.host} cannot be resolved ({error})",
                "correct `server`, mend this machine's DNS, or use /etc/hosts",
            )
        addresses = sorted({str(entry[4][0]) for entry in found})
        if addresses == [host]:
            return fine(f"{host} needs no name server")
        return fine(f"{host} is {', '.join(addresses)}")

    def no_proxy_is_between(self) -> Finding:
        """Look whether the environment sends Flower's node by way of a proxy."""
        proxies = getproxies()
        scheme = "https" if self._with_tls else "http"
        proxy = proxies.get(scheme) or proxies.get("all")
        host = self.address.host
        if proxy is None or proxy_bypass(host):
            return fine("none between this machine and the server")
        return warning(
            f"the environment names the proxy {proxy}: Flower's node goes by way of "
            "it, and the other checks here do not",
            f"unless the server is only reached that way: export NO_PROXY={host}",
        )

    def port_is_open(self) -> Finding:
        """Look whether something listens there."""
        where = self.address
        try:
            with connected(where):
                return fine(f"{where} takes connections")
        except ConnectionRefusedError:
            return problem(
                f"nothing listens at {where}",
                f"start the server there (knnper fed server), or {_CORRECT}",
            )
        except TimeoutError:
            return problem(
                f"{where} did not answer within {TIMEOUT_S:g} s",
                f"let TCP port {where.port} through the firewalls on the way, or "
                f"{_CORRECT}; is its machine up?",
            )
        except OSError as error:
            return problem(
                f"{where} cannot be reached ({error.strerror or error})",
                f"mend this machine's network or route, or {_CORRECT}",
            )

    def tls_is_agreed(self) -> Finding:
        """Look whether both sides speak TLS, or both do not."""
        return self._expecting_tls() if self._with_tls else self._expecting_plain()

    def gateway_answers(self) -> Finding:
        """Look who is there: the gateway, Flower's own port, or other software."""
        try:
            health = self.health
        except (NotHttpError, OSError) as error:
            return self._other_software(f"it does not answer in HTTP ({error})")
        if told_versions(health.headers) and health.status == _OK:
            return fine(f"{self.address} is a federation's gateway")
        if told_versions(health.headers):
            return problem(
                f"the gateway at {self.address} answers, and Flower behind it does not "
                f"(HTTP status {health.status})",
                "wait a minute; then the operator looks into superlink.log in the "
                "server's state folder (knnper site doctor --server SERVER.yaml)",
            )
        if self._ask(_CONTROL).status == _CLOSED_TO_GET:
            return problem(
                f"{self.address} is Flower's own port, where whoever reaches it runs "
                "code on every client",
                f"{_CORRECT}, not of `control`; a SuperLink without `knnper fed "
                "server` needs a gateway in front of it",
                "the gateway's port",
            )
        if health.status == _OK:
            return warning(
                f"{self.address} answers, and is no gateway of knnper's",
                f"if it is not your own proxy: {_CORRECT}",
            )
        return self._other_software(f"{_HEALTH} gives HTTP status {health.status}")

    def clocks_agree(self) -> Finding:
        """Look whether the server's clock and this machine's go together."""
        ahead = self.health.seconds_ahead()
        if ahead is None:
            return skipped("the server does not tell its time")
        latest = AGO_S + AHEAD_S
        where = "ahead of" if ahead > 0 else "behind"
        found = f"this machine's clock is {abs(ahead):.1f} s {where} the server's"
        expected = (
            f"at most {AHEAD_S} s ahead, and {latest} s behind: Flower "
            "refuses signatures of another time"
        )
        advice = "set the clocks of both machines by NTP (timedatectl set-ntp true)"
        if not -latest < ahead < AHEAD_S:
            return problem(found, advice, expected)
        if not -_NOTABLE_BEHIND_S < ahead < _NOTABLE_AHEAD_S:
            return warning(found, advice, expected)
        return fine(f"within {max(abs(ahead), 0.5):.1f} s of the server's")

    def versions_agree(self) -> Finding:
        """Look whether both sides run the same software."""
        return version_finding(own_versions(), told_versions(self.health.headers))

    @cached_property
    def health(self) -> Answer:
        """What the server says of itself, whether it is to be trusted or not."""
        return self._ask(_HEALTH)

    def _ask(self, path: str) -> Answer:
        opened = encrypted if self._with_tls else connected
        with opened(self.address) as connection:
            return get(connection, self.address, path)

    def _expecting_tls(self) -> Finding:
        try:
            with encrypted(self.address) as connection:
                return fine(f"{self.address} speaks {connection.version()}")
        except OSError as error:
            refused = error
        if plain_answer(self.address, _HEALTH) is None:
            return self._other_software(f"no TLS ({refused}), and no HTTP")
        return problem(
            f"{self.address} speaks HTTP without TLS",
            f"have the server started with `tls` in its settings, or {_CORRECT}; "
            "without TLS, the client needs `insecure: true` in place of `tls` and "
            "`key`",
            "TLS, since the client's settings have `tls`",
        )

    def _expecting_plain(self) -> Finding:
        if plain_answer(self.address, _HEALTH) is not None:
            return warning(
                "nothing is encrypted and nobody proves who they are: `insecure: true`",
                "have the operator make certificates and keys (knnper fed "
                "init), and give `tls` and `key`",
            )
        if not speaks_tls(self.address):
            return self._other_software("neither HTTP nor TLS")
        return problem(
            f"{self.address} speaks TLS",
            "remove `insecure: true`, and give `tls` and `key`, which the operator "
            "makes with: knnper fed add-client",
            "no TLS, since the client's settings have `insecure: true`",
        )

    def _other_software(self, found: str) -> Finding:
        return problem(
            f"other software has the port {self.address.port} of {self.address.host}: "
            f"{found}",
            _CORRECT,
            GATEWAY,
        )


_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Site:
    """What a client has of its own."""

    settings: ClientSettings

    def data(self) -> Finding:
        """Look whether the data can be read and learned from."""
        look = f"see all about it: knnper site check {self.settings.file}"
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
            free = f"{where} is free; start it: knnper site serve"
            return self._token() or fine(free)
        with contextlib.suppress(OSError), opened(where) as connection:
            if get(connection, where, "/ready").status in (200, 503):
                return self._token() or fine(f"runs at {where}")
        return problem(
            f"other software has {where}",
            "end it, or set `service.port` to a free port",
            "a free port, or this client's service",
        )

    def _token(self) -> Finding | None:
        token = self.settings.state / "token"
        exposed = permission_problem(token) if token.exists() else None
        if exposed is None:
            return None
        found, _, advice = exposed.partition("; ")
        return problem(found, advice, "mode 0600; knnper site serve refuses any other")

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


_AGAIN = (
    "have the run hand it over again (start knnper fed client), or bring it: knnper "
    "site onboard --model FOLDER"
)


@dataclass(frozen=True)
class State:
    """A client's state folder."""

    settings: ClientSettings

    @property
    def places(self) -> Places:
        """The parts of the folder."""
        return Places(self.settings.state)

    def is_own(self) -> Finding:
        """Look whether the folder is this client's."""
        if not self.places.identity.exists():
            return fine(f"{self.places.folder} is nobody's yet")
        name, file = self.settings.name, self.settings.key
        key = None if file is None else fingerprint(read_node_key(file).public_key())
        try:
            require_own(self.places, name, key)
        except SiteStateError as error:
            return problem_told(str(error))
        return fine(f"{self.places.folder} is that of {name}")

    def is_private(self) -> Finding:
        """Look whether other users of this machine are kept out."""
        folder = self.places.folder
        if not folder.exists():
            return fine(f"{folder} is yet to be made")
        if is_private(folder):
            return fine(f"no other user can look into {folder}")
        return warning(
            f"other users can look into {folder}, which holds the site's examples",
            f"chmod 700 {folder}",
            "mode 0700",
        )

    def node(self) -> Finding:
        """Look whether the client's node runs, or ended without leaving."""
        folder = self.places.folder
        process = holder(folder)
        if process is not None:
            return fine(f"runs (process {process})")
        if did_not_leave(folder):
            return warning(
                "does not run, and did not leave in order the last time",
                "start it: knnper fed client; the server lets it in within a minute",
            )
        return fine("does not run; start it with: knnper fed client")

    def last_refusal(self) -> Finding:
        """Look what was refused since a model was installed, if anything was."""
        refusal = last_refusal(self.places.folder)
        if refusal is None:
            return fine("none was noted")
        when = f"{refusal.time:%Y-%m-%d %H:%M} UTC"
        serving = read_serving(self.places.serving)
        if serving is not None and serving.installed > refusal.time.timestamp():
            return fine(f"the last one, of {when}, is older than the model")
        if refusal.about == "model":
            return problem(
                f"at {when}, {refusal.reason}",
                "install the same versions on both sides, and have the "
                "run distribute its model again",
                "the fingerprint that the server announced",
            )
        if refusal.about == "run":
            return warning(
                f"at {when}, this client refused a run: {refusal.reason}",
                "if it is wanted, change client.yaml; or ask the server's operator for "
                "another experiment",
            )
        return warning(
            f"at {when}, the server refused this client: {refusal.reason}",
            f"once that is mended, remove {self.places.folder / REFUSALS}",
        )

    def models(self) -> Finding:
        """Look whether the served model is there, and all models are what they were."""
        serving = read_serving(self.places.serving)
        if serving is None:
            return skipped("no model is installed yet")
        if not self.places.model(serving.model).is_dir():
            return problem(
                f"{self.places.serving} names the model {serving.model[:12]}, which is "
                f"not in {self.places.models}",
                _AGAIN,
            )
        broken = list(self._broken())
        if broken:
            return problem(
                "; ".join(broken),
                f"remove what is damaged from {self.places.models}, and {_AGAIN}",
                "the model that each folder is named after",
            )
        return fine(f"{serving.model[:12]} of {serving.run}; its fingerprint is right")

    def store(self) -> Finding:
        """Look whether the memory was embedded by the model that is served."""
        serving = read_serving(self.places.serving)
        pending = pending_serving(self.places)
        if not (self.places.store / DATABASE).is_file():
            return warning(
                f"there is no memory in {self.places.store}",
                "knnper site onboard fills one; knnper site serve begins an empty one",
            )
        try:
            with open_store(self.places.store) as store:
                embedded_by, count = store.fingerprint, len(store)
        except StoreError as error:
            advice = f"knnper store verify {self.places.store}"
            return problem(str(error), f"see what is left of it: {advice}")
        found = f"{count} examples, embedded by the model {embedded_by[:12]}"
        if pending is not None and embedded_by == pending.model:
            return fine(f"{found}, which is about to be served")
        if serving is not None and embedded_by != serving.model:
            return problem(
                found,
                "start knnper site serve, which embeds them anew",
                f"the model that is served, {serving.model[:12]}",
            )
        return fine(found)

    def _broken(self) -> Iterator[str]:
        for folder in sorted(self.places.models.iterdir()):
            if folder.name.startswith("."):
                continue
            try:
                require_fingerprint(load_model(folder), folder.name, str(folder))
            except ModelError as error:
                yield str(error)


def did_not_leave(folder: Path) -> bool:
    """Return whether the last node of a state folder ended without leaving."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return Activation.of(folder, descriptor).left_behind() is not None
    finally:
        os.close(descriptor)


# After two missed signs of life, 30 s apart, Flower takes a node for gone.
_FORGOTTEN_S = 60.0


@dataclass(frozen=True)
class Credentials:
    """A client's name and key, and the server that should know them."""

    settings: ClientSettings
    key: Path
    ca: Path

    def key_is_readable(self) -> Finding:
        """Look at the key's file."""
        try:
            key = read_node_key(self.key)
        except CredentialError as error:
            return problem(
                str(error),
                "bring back the key that the operator sent, or correct `key`; a new "
                "key has to be registered: knnper fed register SERVER.yaml "
                f"{self.settings.name} {self.key.name}.pub",
            )
        exposed = permission_problem(self.key)
        if exposed is not None:
            found, _, advice = exposed.partition("; ")
            return warning(found, advice, "mode 0600")
        return fine(f"{fingerprint(key.public_key())} ({self.key})")

    def key_is_registered(self) -> Finding:
        """Ask the server whether it knows the key; see `standing` for how."""
        key = read_node_key(self.key)
        response = self._asked(key)
        if response is None:
            return problem(
                "the server did not answer", "try again, and look into the server's log"
            )
        error = FlowerError.of(response.text)
        code, told = error.code, error.extra or error.detail
        if code == NOT_ACCEPTED:
            public, name = f"{self.key.name}.pub", self.settings.name
            return problem(
                f"the key {fingerprint(key.public_key())} is not registered with the "
                "server, or no longer",
                f"send {public} to the federation's operator, who runs: knnper fed "
                f"register SERVER.yaml {name} {public}. A key that was removed cannot "
                "come back: make a new one",
            )
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            return problem(
                f"the server does not take the key's signature: {told}",
                "set the clocks of both machines; if they agree, have the operator "
                "register this key anew",
            )
        if code != BAD_HEARTBEAT:
            return problem(
                f"the server's answer cannot be understood (HTTP status "
                f"{response.status_code}): {told}",
                "install the same versions on both sides",
            )
        return self._standing(standing_in(response.text))

    def _asked(self, key: ec.EllipticCurvePrivateKey) -> httpx.Response | None:
        request = ActivateNodeRequest(
            public_key=public_pem(key.public_key()),
            heartbeat_interval=IMPOSSIBLE_PAUSE_S,
        )
        try:
            with http_client(self.settings.server, self.ca) as client:
                return post(client, ACTIVATE, request, signed_headers(key))
        except httpx.HTTPError:
            return None

    def _standing(self, standing: Standing | None) -> Finding:
        here, name = holder(self.settings.state), self.settings.name
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
        state = self.settings.state
        if did_not_leave(state):
            return warning(
                f"{heard}, maybe the one of {state}, which did not leave in order",
                "start it again: knnper fed client; it is let in within a minute",
            )
        return problem(
            f"{heard}, which does not run from {state}",
            "stop the other node: a second one is refused while the first is there. "
            "For another client, make another key: knnper fed add-client",
            "no other node with this client's name and key",
        )


_COPY = "copy the federation's ca.crt there, or correct `tls.ca`"

# OpenSSL's numbers of what is wrong with the certificate itself.
_NOT_OF_AUTHORITY = frozenset({9, 10, 62, 63, 64})


@dataclass(frozen=True)
class Trust:
    """The server's certificate and the authority that the client trusts."""

    connection: Connection
    ca: Path

    def authority_is_readable(self) -> Finding:
        """Look at the authority's certificate, which is a file."""
        try:
            authority = read_certificate(self.ca)
        except CredentialError as error:
            return problem(str(error), _COPY)
        told = expiry_problem(authority, datetime.now(UTC))
        if told is not None:
            found = told.partition("; ")[0]
            advice = "make a new federation folder, and copy its files to all machines"
            return problem(f"of the authority, {found}", advice)
        return fine(f"{authority.subject.rfc4514_string()} ({self.ca})")

    def certificate_is_accepted(self) -> Finding:
        """Look at the server's certificate, as Flower's node does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        try:
            with encrypted(self.connection.address, context) as connection:
                certificate = _shown(connection)
        except ssl.SSLCertVerificationError as error:
            return self._why_not(error)
        soon = expires_soon(certificate, datetime.now(UTC))
        if soon is not None:
            found, _, advice = soon.partition("; ")
            return warning(found, advice)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        return fine(f"for {', '.join(hosts_of(certificate))}, valid until {until}")

    def _why_not(self, error: ssl.SSLCertVerificationError) -> Finding:
        with encrypted(self.connection.address) as connection:
            certificate = _shown(connection)
        told = list(self._complaints(certificate, error.verify_code))
        if not told:
            return problem_told(
                f"the certificate is not accepted ({error.verify_message}); have the "
                "operator renew it: knnper fed renew"
            )
        parts = [sentence.partition("; ") for sentence in told]
        return problem(
            "; ".join(found for found, _, _ in parts),
            "; ".join(advice for _, _, advice in parts),
        )

    def _complaints(self, certificate: x509.Certificate, code: int) -> Iterator[str]:
        now = datetime.now(UTC)
        expired = expiry_problem(certificate, now)
        if expired is not None:
            yield self._by_whose_clock(certificate, now) or expired
        wrong_host = host_problem(certificate, self.connection.address.host)
        if wrong_host is not None:
            yield wrong_host
        wrong_authority = authority_problem(certificate, read_certificate(self.ca))
        if wrong_authority is not None and code not in _NOT_OF_AUTHORITY:
            yield wrong_authority

    def _by_whose_clock(
        self, certificate: x509.Certificate, now: datetime
    ) -> str | None:
        """Say so if only this machine's clock has the certificate not valid."""
        ahead_s = self.connection.health.seconds_ahead() or 0.0
        if expiry_problem(certificate, now - timedelta(seconds=ahead_s)) is not None:
            return None
        return (
            f"the certificate is not valid at {now:%Y-%m-%d %H:%M} UTC, which is this "
            "machine's time, and valid at the server's; set this machine's clock"
        )


def _shown(connection: ssl.SSLSocket) -> x509.Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise ssl.SSLError("the server shows no certificate")
    return x509.load_der_x509_certificate(der)


def client_checks(settings: ClientSettings) -> Iterator[Check]:
    """Yield the checks of a client in order; they change and disturb nothing."""
    connection = Connection(settings.server, with_tls=not settings.insecure)
    yield Check("address", connection.name_resolves)
    yield Check("proxy", connection.no_proxy_is_between, ("address",))
    yield Check("port", connection.port_is_open, ("address",))
    yield Check("tls", connection.tls_is_agreed, ("port",))
    yield Check("gateway", connection.gateway_answers, ("tls",))
    yield Check("clock", connection.clocks_agree, ("gateway",))
    yield Check("version", connection.versions_agree, ("gateway",))
    if settings.tls is not None:
        trust = Trust(connection, settings.tls.ca)
        yield Check("authority", trust.authority_is_readable)
        yield Check(
            "certificate", trust.certificate_is_accepted, ("gateway", "authority")
        )
    if settings.tls is not None and settings.key is not None:
        credentials = Credentials(settings, settings.key, settings.tls.ca)
        yield Check("key", credentials.key_is_readable)
        yield Check(
            "registration",
            credentials.key_is_registered,
            # Nothing is signed for a server that is not known.
            ("key", "certificate", "clock"),
        )
    state, site = State(settings), Site(settings)
    yield Check("folder", lambda: folder_finding(settings.state, "state"))
    yield Check("owner", state.is_own, ("folder", "key"))
    yield Check("privacy", state.is_private, ("folder",))
    yield Check("node", state.node, ("folder",))
    yield Check("refusals", state.last_refusal, ("folder",))
    yield Check("limits", site.limits)
    yield Check("data", site.data)
    yield Check("model", state.models, ("folder",))
    yield Check("memory", state.store, ("model",))
    yield Check("service", site.service)
