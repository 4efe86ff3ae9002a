"""Flower's SuperLink as a process of ours."""

import asyncio
import contextlib
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from knnper import lifeline
from knnper.config.errors import RunError
from knnper.transport.credentials.certificates import (
    issue_server_certificate,
    new_authority,
    write_certificate,
)
from server.link.commands import commands_folder, flower_command
from server.link.log_file import WARNINGS_VARIABLE, LogFile
from server.link.processes import Note, end_children
from server.settings import ServerSettings

SERVER_FILE_VARIABLE = "KNNPER_SERVER"
"""Environment variable with the absolute path of the server's YAML file."""

_LOG_TAIL = 2000
_STOP_SECONDS = 10.0
_HELPERS_SECONDS = 5.0
_POLL_SECONDS = 0.1
# Flower ends idle connections after 5 s; one that is older is not used again.
_IDLE_SECONDS = 2.0
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)


def control_authority(settings: ServerSettings) -> Path | None:
    """Return the certificate of the authority of Flower's own port; None without TLS.

    It is there once the server has been started.
    """
    return None if settings.insecure else _tls_folder(settings) / "ca.crt"


class SuperLink:
    """Starts, watches and stops the process.

    Parameters
    ----------
    settings
        Of the server.
    server_file
        The file that ``settings`` are from; the ServerApp finds it in its environment.
    """

    def __init__(self, settings: ServerSettings, server_file: Path) -> None:
        self._settings = settings
        self._server_file = server_file
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0

    @property
    def ca(self) -> Path | None:
        """Certificate of the authority of Flower's own port; None without TLS."""
        return control_authority(self._settings)

    @property
    def folder(self) -> Path:
        """The server's state folder, where its processes are."""
        return self._settings.state

    @property
    def database(self) -> Path:
        """Where Flower keeps registrations, runs and what is on its way."""
        return self.folder / "superlink.db"

    @property
    def address(self) -> str:
        """Flower's own port."""
        return str(self._settings.control_address)

    @property
    def trust(self) -> Sequence[str]:
        """The options with which Flower's commands reach it."""
        if self.ca is None:
            return ["--insecure"]
        return ["--root-certificates", str(self.ca)]

    @property
    def log(self) -> LogFile:
        """Where SuperLink and ServerApps write, with its earlier parts."""
        return LogFile(self.folder / "superlink.log")

    @property
    def warnings(self) -> LogFile:
        """Where the ServerApp writes what the server's own log has to say too."""
        return LogFile(self.folder / "warnings.log")

    def prepare(self) -> None:
        """Make certificates for Flower's own port, which nobody else needs to trust."""
        if self._settings.insecure:
            return
        folder = self._tls_folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ca.crt", "superlink.crt", "superlink.key"):
            (folder / name).unlink(missing_ok=True)
        authority = new_authority("knnper loopback")
        hosts = ("localhost", self._settings.control_address.host)
        identity = issue_server_certificate(authority, hosts)
        identity.write(folder / "superlink.crt", folder / "superlink.key")
        write_certificate(folder / "ca.crt", authority.certificate)

    async def start(self) -> None:
        """Start the process; it may not answer yet."""
        self.log.put_aside()
        self._process = await self.spawn(*self._command())
        self._starts += 1
        Note(self._process.pid, self._starts).write(self.folder)

    async def spawn(
        self, *command: str, inherited: Sequence[int] = ()
    ) -> asyncio.subprocess.Process:
        """Start a command of Flower's that writes to the log and ends with us."""
        with self.log.path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", lifeline.__file__, str(os.getpid())),
                *command,
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.folder,
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        if self._process is None:
            raise RunError("the SuperLink has not been started")
        return await self._process.wait()

    async def end_helpers(self) -> None:
        """End what an ended SuperLink left behind: the ServerApps."""
        await asyncio.to_thread(end_children, _HELPERS_SECONDS)

    async def answers(self) -> None:
        """Wait until the process answers.

        Raises
        ------
        RunError
            If it ends instead; with the end of its log.
        """
        ended = asyncio.ensure_future(self.wait())
        try:
            async with self.client() as client:
                while not await _is_healthy(client):
                    await asyncio.wait([ended], timeout=_POLL_SECONDS)
                    if ended.done():
                        raise RunError(self._failure(ended.result()))
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """End the process and its helpers, kindly first."""
        if self._process is None:
            return
        if self._process.returncode is None:
            await _end(self._process)
        await self.end_helpers()

    @property
    def _tls_folder(self) -> Path:
        return _tls_folder(self._settings)

    def client(self) -> httpx.AsyncClient:
        """Return what asks Flower's own port."""
        verify = self.ca is None or ssl.create_default_context(cafile=self.ca)
        return httpx.AsyncClient(
            base_url=f"{'http' if self.ca is None else 'https'}://{self.address}",
            verify=verify,
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            # Not by way of a proxy that the environment names.
            trust_env=False,
        )

    def _command(self) -> list[str]:
        address = self._settings.control_address
        return [
            str(flower_command("flower-superlink")),
            *("--host", address.host, "--port", str(address.port)),
            *("--database", str(self.database)),
            "--disable-runtime-dependency-installation",
            # Without a flower-superexec; see server.link.serverapps.
            *("--isolation", "process"),
            *self._security(),
        ]

    def _security(self) -> Sequence[str]:
        if self._settings.insecure:
            return ["--insecure"]
        folder = self._tls_folder
        return [
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "superlink.crt")),
            *("--ssl-keyfile", str(folder / "superlink.key")),
            "--enable-supernode-auth",
        ]

    def _environment(self) -> dict[str, str]:
        # Flower looks for its helpers by name.
        paths = os.environ.get("PATH", os.defpath)
        path = os.pathsep.join((str(commands_folder()), paths))
        return {
            **os.environ,
            "PATH": path,
            "FLWR_HOME": str(self._settings.flower_home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONUNBUFFERED": "1",
            SERVER_FILE_VARIABLE: str(self._server_file),
            WARNINGS_VARIABLE: str(self.warnings.path.resolve()),
        }

    def _failure(self, status: int) -> str:
        tail = self.log.path.read_text(errors="replace")[-_LOG_TAIL:]
        return (
            f"Flower's SuperLink ended with status {status} before it was ready; the "
            f"end of {self.log.path}:\n{tail}"
        )


def _tls_folder(settings: ServerSettings) -> Path:
    return settings.flower_home / "tls"


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.HTTPError:
        return False
