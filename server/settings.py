"""Settings of a federation's server, from a YAML file."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.errors import ConfigError, Problem
from knnper.own import MachineSettings
from knnper.settings import (
    Name,
    PositiveInt,
    Settings,
    alternatives,
    apply_overrides,
    parse_overrides,
    parse_settings,
    shown,
)
from knnper.transport.credentials import Address, parse_address
from knnper.yaml_text import read_yaml


@dataclass(frozen=True)
class TlsFiles(Settings):
    """Files of the server's certificate.

    Attributes
    ----------
    ca
        Certificate of the authority that clients trust.
    certificate
        The server's own, followed by intermediate certificates, if any.
    key
        Its private key.
    """

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class ServerSettings(MachineSettings):
    """Settings of one server.

    Attributes
    ----------
    name
        Name of the federation in logs.
    listen
        Address of the gateway, ``HOST:PORT``.
    control
        Address of Flower's own port, which can send code to every client: loopback
        only.
    tls
        The server's certificate; required unless ``insecure``.
    insecure
        Neither encryption nor authentication: any program that reaches the port is a
        client.
    authorized
        Folder of the clients' public keys: ``NAME.pub`` registers the client NAME.
    state
        Folder of registrations, logs and runs.
    runs
        Folder of the runs' folders; ``state``/runs by default.
    max_request_mb
        Largest body of a client's request, in 10^6 bytes. Flower sends arrays in
        pieces of 5 MB.
    max_in_flight_mb
        Bodies of clients' requests in memory at a time, in 10^6 bytes: half of that for
        one address, an eighth for one client. Further requests wait, or are retried.
    max_upload_mb
        Most that one client may send in one run, in 10^6 bytes. Without it, each reply
        may have 16 times the bytes of its request, or 64 MiB.
    max_connections_per_address
        Connections at a time with one address: a client, several clients behind one
        router, or a stranger.
    own_code, pretrained
        Code and files of this server that an experiment may use; a submitted experiment
        brings no code. See `OwnCodeSettings` and `MachineSettings`.
    """

    name: Name = "federation"
    listen: str = "0.0.0.0:8443"
    control: str = "127.0.0.1:8000"
    tls: TlsFiles | None = None
    insecure: bool = False
    authorized: Path = Path("authorized")
    state: Path = Path("state")
    runs: Path | None = None
    max_request_mb: PositiveInt = 16
    max_in_flight_mb: PositiveInt = 256
    max_upload_mb: PositiveInt | None = None
    max_connections_per_address: PositiveInt = 200

    @property
    def listen_address(self) -> Address:
        """Address of the gateway."""
        return parse_address(self.listen)

    @property
    def control_address(self) -> Address:
        """Address of Flower's own port."""
        return parse_address(self.control)

    @property
    def runs_folder(self) -> Path:
        """The folder of the runs' folders."""
        return self.runs or self.state / "runs"

    @property
    def flower_home(self) -> Path:
        """``FLWR_HOME`` of Flower's commands on the server."""
        return self.state / "flwr"

    @property
    def roster_file(self) -> Path:
        """File of the registered clients; see `knnper.server.link.authorized`."""
        return self.state / "roster.json"

    def below(self, base: Path) -> "ServerSettings":
        """Return the settings with relative paths resolved against ``base``."""
        tls = self.tls
        return dataclasses.replace(
            self,
            tls=tls and TlsFiles(base / tls.ca, base / tls.certificate, base / tls.key),
            authorized=base / self.authorized,
            state=base / self.state,
            runs=self.runs and base / self.runs,
            **self.at(base),
        )


def read_server(path: Path, overrides: Sequence[str] = ()) -> ServerSettings:
    """Read settings from a YAML file, changed by overrides ``KEY=VALUE``.

    Relative paths are resolved against the file's folder.

    Raises
    ------
    ConfigError
        With all problems at once.
    """
    document = read_yaml(
        path, "make one with: knnper fed init FOLDER --host NAME_OR_IP"
    )
    if not isinstance(document, Mapping):
        names = (field.name for field in dataclasses.fields(ServerSettings))
        known = alternatives("", names)
        message = f"found {shown(document)}, expected a mapping; {known}"
        raise ConfigError([Problem("document", message)], str(path))
    problems: list[Problem] = []
    merged = apply_overrides(document, parse_overrides(overrides, problems), problems)
    settings = parse_settings(ServerSettings, merged, "", problems)
    if settings is not None:
        problems.extend(_inconsistencies(settings))
    if settings is None or problems:
        raise ConfigError(problems, str(path))
    return settings.below(path.resolve().parent)


def _inconsistencies(settings: ServerSettings) -> Iterable[Problem]:
    if settings.insecure and settings.tls is not None:
        message = "found tls and insecure: true, expected one of the two; remove one"
        yield Problem("tls", message)
    if not settings.insecure and settings.tls is None:
        message = (
            "expected {ca: ..., certificate: ..., key: ...}, found nothing; make them "
            "with: knnper fed init, or write insecure: true to do without encryption "
            "and authentication"
        )
        yield Problem("tls", message)
    addresses: dict[str, Address] = {}
    for place in ("listen", "control"):
        try:
            addresses[place] = parse_address(getattr(settings, place))
        except ValueError as error:
            yield Problem(place, str(error))
    control = addresses.get("control")
    if control is not None and not control.is_loopback:
        message = (
            f"found {shown(settings.control)}, expected a loopback address, "
            "as 127.0.0.1:8000: any program that reaches this port can run code on "
            "every client"
        )
        yield Problem("control", message)
    if control is not None and addresses.get("listen") == control:
        yield Problem("listen", "found the address of control; choose another port")
