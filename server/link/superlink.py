"""Flower's SuperLink as a process of this server."""

import asyncio
import contextlib
import json
import logging
import logging.handlers
import os
import resource
import signal
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

from knnper import lifeline
from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.server.settings import ServerSettings
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    Address,
    issue_server_certificate,
    new_authority,
    write_certificate,
)

# The folder of the commands that were installed with this Python's packages.
COMMANDS = Path(sys.executable).parent
# The name of this server in the configuration of Flower's commands, as in
# ``flwr list federation``.
CONNECTION = "federation"
# Environment variable with the absolute path of the server's YAML file.
SERVER_FILE_VARIABLE = "KNNPER_SERVER"
# Environment variable with a descriptor of the server's standard error. ServerApps
# write warnings there, since Flower keeps their own logs in its database.
WARNINGS_VARIABLE = "KNNPER_WARNINGS"
# Of the server's own log.
LOG_LAYOUT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_LOG_BYTES = 10_000_000
_NUM_OLD_LOGS = 3
_LOG_TAIL = 2000  # characters that an error quotes
_STOP_S = 10.0
_POLL_S = 0.1
# Flower closes idle connections after 5 s, so an older one must not be used again.
_IDLE_S = 2.0
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
# Some libraries visit every descriptor that is allowed, and a limit may be a billion.
_MOST_DESCRIPTORS = 65_536

logger = logging.getLogger(__name__)


def flower_command(name: str) -> Path:
    """Return the path of one of Flower's commands."""
    command = COMMANDS / name
    if not command.exists():
        raise RunError(f"there is no {command}; install flwr beside this program")
    return command


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    allowed = _MOST_DESCRIPTORS if hard == infinite else min(hard, _MOST_DESCRIPTORS)
    if soft != infinite and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def write_connection(home: Path, control: Address, ca: Path | None) -> None:
    """Write the ``config.toml`` of Flower's commands into ``home`` (``FLWR_HOME``)."""
    trust = f"root-certificates = {json.dumps(str(ca))}"
    home.mkdir(parents=True, exist_ok=True)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f"address = {json.dumps(str(control))}\n"
        f"{'insecure = true' if ca is None else trust}\n"
    )
    write_atomically(home / "config.toml", text)


def control_authority(settings: ServerSettings) -> Path | None:
    """Return the CA certificate of the control port, or None without TLS."""
    return None if settings.insecure else _tls_folder(settings) / "ca.crt"


class SuperLink:
    """The SuperLink's process, its log and its own certificates.

    Attributes
    ----------
    address
        Of the control port, on this machine only.
    ca
        CA certificate of the control port, or None without TLS.
    trust
        Options that let Flower's commands verify the control port.
    log_file
        Output of the SuperLink and of the ServerApps.
    """

    def __init__(self, settings: ServerSettings, server_file: Path) -> None:
        self._settings = settings
        self._server_file = server_file
        self._process: asyncio.subprocess.Process | None = None
        self._copying: set[asyncio.Task[None]] = set()
        self._log: logging.Handler | None = None
        self.address = str(settings.control_address)
        self.ca = control_authority(settings)
        with_ca = ("--root-certificates", str(self.ca))
        self.trust = ("--insecure",) if self.ca is None else with_ca
        self.log_file = settings.state / "superlink.log"

    def write_certificates(self) -> None:
        """Make the control port's certificates, which only this machine trusts."""
        if self._settings.insecure:
            return
        folder = _tls_folder(self._settings)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ca.crt", "superlink.crt", "superlink.key"):
            (folder / name).unlink(missing_ok=True)
        authority = new_authority("knnper loopback")
        hosts = ("localhost", self._settings.control_address.host)
        identity = issue_server_certificate(authority, hosts)
        identity.write(folder / "superlink.crt", folder / "superlink.key")
        write_certificate(folder / "ca.crt", authority.certificate)

    async def start(self) -> None:
        """Start the process, and wait until it answers.

        Raises
        ------
        RunError
            The process ended before it was ready.
        """
        self._process = await self.spawn(*self._command())
        ended = asyncio.ensure_future(self.wait())
        try:
            async with self.http_client() as client:
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(flower.HEALTH)).is_success:
                            return
                    await asyncio.wait([ended], timeout=_POLL_S)
                    if ended.done():
                        tail = self.log_file.read_text(errors="replace")[-_LOG_TAIL:]
                        raise RunError(
                            f"Flower's SuperLink ended with status {ended.result()} "
                            f"before it was ready; the end of {self.log_file}:\n{tail}"
                        )
        finally:
            ended.cancel()

    async def spawn(
        self,
        *command: str,
        inherited: Sequence[int] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> asyncio.subprocess.Process:
        """Start one of Flower's commands, which writes to the log and ends with us."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", lifeline.__file__, str(os.getpid())),
            *command,
            pass_fds=inherited,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environment(), **variables},
            cwd=self._settings.state,
            start_new_session=True,
        )
        assert process.stdout is not None
        copying = asyncio.create_task(self._copy_to_log(process.stdout))
        self._copying.add(copying)
        copying.add_done_callback(self._copying.discard)
        return process

    async def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""
        if self._process is None:
            raise RunError("the SuperLink has not been started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await end_process(self._process)
        # The last output of the processes belongs in the log, too.
        await asyncio.gather(*self._copying)
        if self._log is not None:
            self._log.close()
            self._log = None

    def http_client(self) -> httpx.AsyncClient:
        """Return an HTTP client for the control port."""
        verify = self.ca is None or ssl.create_default_context(cafile=self.ca)
        return httpx.AsyncClient(
            base_url=f"{'http' if self.ca is None else 'https'}://{self.address}",
            verify=verify,
            timeout=_TIMEOUT,
            # httpx would queue requests beyond 100 connections.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            # A proxy that the environment names cannot reach this machine's loopback.
            trust_env=False,
        )

    async def _copy_to_log(self, output: asyncio.StreamReader) -> None:
        if self._log is None:
            self._log = logging.handlers.RotatingFileHandler(
                self.log_file, maxBytes=_LOG_BYTES, backupCount=_NUM_OLD_LOGS
            )
            self._log.terminator = ""
        while data := await output.read(65_536):
            text = data.decode(errors="replace")
            self._log.emit(logging.makeLogRecord({"msg": text}))

    def _command(self) -> list[str]:
        address, folder = self._settings.control_address, _tls_folder(self._settings)
        secured = [
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "superlink.crt")),
            *("--ssl-keyfile", str(folder / "superlink.key")),
            "--enable-supernode-auth",
        ]
        return [
            str(flower_command("flower-superlink")),
            *("--host", address.host, "--port", str(address.port)),
            *("--database", str(self._settings.state / "superlink.db")),
            "--disable-runtime-dependency-installation",
            # Without a flower-superexec: `ServerApps` starts the ServerApps.
            *("--isolation", "process"),
            *(["--insecure"] if self._settings.insecure else secured),
        ]

    def _environment(self) -> dict[str, str]:
        paths = os.environ.get("PATH", os.defpath)
        return {
            **os.environ,
            # Flower looks for its commands by name.
            "PATH": os.pathsep.join((str(COMMANDS), paths)),
            "FLWR_HOME": str(self._settings.flower_home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONUNBUFFERED": "1",
            SERVER_FILE_VARIABLE: str(self._server_file),
        }


async def end_process(process: asyncio.subprocess.Process) -> None:
    """End a process and its process group: SIGTERM first, SIGKILL after 10 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_S)


def _tls_folder(settings: ServerSettings) -> Path:
    return settings.flower_home / "tls"
