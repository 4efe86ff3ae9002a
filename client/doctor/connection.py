"""The way to the server: its address, its port, who is there, its clock and version."""

import socket
from functools import cached_property
from urllib.request import getproxies, proxy_bypass

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from knnper.config.address import Address, parse_address
from knnper.transport.diagnosis.finding import (
    Finding,
    fine,
    problem,
    skipped,
    warning,
)
from knnper.transport.diagnosis.network import (
    TIMEOUT_S,
    Answer,
    NotHttpError,
    connected,
    encrypted,
    get,
    plain_answer,
    speaks_tls,
)
from knnper.transport.diagnosis.versions import (
    own_versions,
    told_versions,
    version_finding,
)

_HEALTH, _CONTROL = "/health", "/v1/control/list-nodes"
_OK, _CLOSED_TO_GET = 200, 405
_CORRECT = "correct `server`: it is HOST:PORT of `listen` in the server's settings"
# A part of what Flower bears, so that a warning comes before the refusal.
_NOTABLE_AHEAD_S, _NOTABLE_BEHIND_S = 2.0, 60.0


class Connection:
    """A server as a client reaches it; each method is a check.

    Parameters
    ----------
    server
        ``HOST:PORT``.
    with_tls
        Whether the client's settings ask for TLS.
    """

    def __init__(self, server: str, *, with_tls: bool) -> None:
        self._text = server
        self._with_tls = with_tls

    @cached_property
    def address(self) -> Address:
        """Where the server is.

        Raises
        ------
        ValueError
            If the settings hold no address.
        """
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
                "correct `server`, mend this machine's DNS, or add the name to "
                "/etc/hosts",
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
                f"start the server there (knnper server), or {_CORRECT}",
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
        if told_versions(health.headers):
            return _of_gateway(self.address, health.status)
        if self._ask(_CONTROL).status == _CLOSED_TO_GET:
            return problem(
                f"{self.address} is Flower's own port, where whoever reaches it runs "
                "code on every client",
                f"{_CORRECT}, not of `control`; a SuperLink without `knnper server` "
                "needs a gateway in front of it",
                "the gateway's port",
            )
        if health.status == _OK:
            return warning(
                f"{self.address} answers, and is no gateway of knnper's",
                f"if it is not your own proxy: {_CORRECT}",
            )
        return self._other_software(f"{_HEALTH} gives HTTP status {health.status}")

    def clocks_agree(self) -> Finding:
        """Look whether the server's clock and this machine's go together.

        A signature of Flower's is of a time; the server takes those of the last 305
        seconds and of the next 5.
        """
        ahead = self.health.seconds_ahead()
        if ahead is None:
            return skipped("the server does not tell its time")
        latest = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        where = "ahead of" if ahead > 0 else "behind"
        found = f"this machine's clock is {abs(ahead):.1f} s {where} the server's"
        expected = (
            f"at most {SYSTEM_TIME_TOLERANCE} s ahead, and {latest} s behind: Flower "
            "refuses signatures of another time"
        )
        advice = "set the clocks of both machines by NTP (timedatectl set-ntp true)"
        if not -latest < ahead < SYSTEM_TIME_TOLERANCE:
            return problem(found, advice, expected)
        if not -_NOTABLE_BEHIND_S < ahead < _NOTABLE_AHEAD_S:
            return warning(found, advice, expected)
        return fine(f"within {max(abs(ahead), 0.5):.1f} s of the server's")

    def versions_agree(self) -> Finding:
        """Look whether both sides run the same software."""
        return version_finding(own_versions(), told_versions(self.health.headers))

    @cached_property
    def health(self) -> Answer:
        """What the server says of itself, whether it is to be trusted or not.

        Raises
        ------
        NotHttpError, OSError
            If it does not answer.
        """
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
                "have the operator make certificates and keys (knnper federation "
                "init), and give `tls` and `key`",
            )
        if not speaks_tls(self.address):
            return self._other_software("neither HTTP nor TLS")
        return problem(
            f"{self.address} speaks TLS",
            "remove `insecure: true`, and give `tls` and `key`, which the operator "
            "makes with: knnper federation add-client",
            "no TLS, since the client's settings have `insecure: true`",
        )

    def _other_software(self, found: str) -> Finding:
        return problem(
            f"other software has the port {self.address.port} of {self.address.host}: "
            f"{found}",
            _CORRECT,
            "the federation's gateway",
        )


def _of_gateway(where: Address, status: int) -> Finding:
    if status == _OK:
        return fine(f"{where} is a federation's gateway")
    return problem(
        f"the gateway at {where} answers, and Flower behind it does not (HTTP status "
        f"{status})",
        "wait a minute; then the operator looks into superlink.log in the server's "
        "state folder (knnper doctor --server SERVER.yaml)",
    )
