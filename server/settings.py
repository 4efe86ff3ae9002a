"""The server of a federation, from one YAML file."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper import experiment
from knnper.errors import ConfigError, Problem
from knnper.own import LocalSettings
from knnper.transport.credentials import Address, parse_address


@dataclass(frozen=True)
class TlsFiles(experiment.Settings):
    """Where the server's certificate is.

    Attributes
    ----------
    ca
        Certificate of the authority that clients trust.
    certificate
        The server's own, followed by intermediate ones if there are any.
    key
        Its private key.
    """

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class ServerSettings(LocalSettings):
    """One server.

    Attributes
    ----------
    name
        What the federation is called in logs.
    listen
        Where clients reach the gateway.
    control
        Flower's own port, which can send code to every client: loopback only.
    tls
        The server's certificate; may only be missing with ``insecure``.
    insecure
        Neither encryption nor authentication: whoever reaches the port is a client.
    authorized
        Folder of the clients' public keys: ``NAME.pub`` lets NAME in.
    state
        Folder of what the server keeps.
    runs
        Folder of the runs' folders.
    max_request_mb
        Largest body of a client's request, in 10^6 bytes. Flower sends arrays in
        pieces of 5 MB.
    max_in_flight_mb
        Bodies of clients' requests that are held at a time, in 10^6 bytes: half of
        that for one address, an eighth for one client. Who comes when they are held
        waits, or tries again.
    max_upload_mb
        What one client may send in one run, in 10^6 bytes. Without it, each of its
        replies may have 16 times the bytes of what it answers, or 64 MiB.
    max_connections_per_address
        Connections that the gateway keeps at a time with one address, be it a client,
        several behind one router, or a stranger.
    own_code, pretrained
        What an experiment may use of this server's own code and files; an experiment
        that is submitted brings no code. See `OwnCodeSettings` and `LocalSettings`.
    """

    name: experiment.Name = "federation"
    listen: str = "0.0.0.0:8443"
    control: str = "127.0.0.1:8000"
    tls: TlsFiles | None = None
    insecure: bool = False
    authorized: Path = Path("authorized")
    state: Path = Path("state")
    runs: Path | None = None
    max_request_mb: experiment.PositiveInt = 16
    max_in_flight_mb: experiment.PositiveInt = 256
    max_upload_mb: experiment.PositiveInt | None = None
    max_connections_per_address: experiment.PositiveInt = 200

    @property
    def listen_address(self) -> Address:
        """Where clients reach the gateway."""
        return parse_address(self.listen)

    @property
    def control_address(self) -> Address:
        """Where the operator reaches Flower."""
        return parse_address(self.control)

    @property
    def runs_folder(self) -> Path:
        """The folder of the runs' folders."""
        return self.runs or self.state / "runs"

    @property
    def flower_home(self) -> Path:
        """``FLWR_HOME`` of everything of Flower's that runs on the server."""
        return self.state / "flwr"

    @property
    def roster_file(self) -> Path:
        """Who is registered; see `knnper.server.link.authorized`."""
        return self.state / "roster.json"

    def below(self, base: Path) -> "ServerSettings":
        """Return the same with relative paths taken as relative to ``base``."""
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
    """Return the settings in the YAML file ``path``, changed by ``KEY=VALUE``.

    Relative paths in it are relative to its folder, and become absolute. Raises
    `ConfigError` with *all* problems.
    """
    document = experiment.read_yaml(
        path, "make one with: knnper fed init FOLDER --host NAME_OR_IP"
    )
    if not isinstance(document, Mapping):
        names = (field.name for field in dataclasses.fields(ServerSettings))
        known = experiment.alternatives("", names)
        message = f"found {experiment.shown(document)}, expected a mapping; {known}"
        raise ConfigError([Problem("document", message)], str(path))
    problems: list[Problem] = []
    merged = experiment.apply_overrides(
        document, experiment.parse_overrides(overrides, problems), problems
    )
    settings = experiment.parse_settings(ServerSettings, merged, "", problems)
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
            f"found {experiment.shown(settings.control)}, expected a loopback address, "
            "as 127.0.0.1:8000: whoever reaches this port runs code on every client"
        )
        yield Problem("control", message)
    if control is not None and addresses.get("listen") == control:
        yield Problem("listen", "found the address of control; choose another port")
