"""Flower's SuperLink and ServerApps as processes of ours, and its database."""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse

from knnper import lifeline
from knnper.errors import RunError
from knnper.files import parse_json, write_atomically
from knnper.server.settings import ServerSettings
from knnper.transport.credentials import (
    Address,
    issue_server_certificate,
    new_authority,
    write_certificate,
)
from knnper.transport.flower_protocol import ACQUIRE_TASK, PROTOBUF, SERVER_APP
from knnper.transport.polling import ANNOUNCEMENTS_VARIABLE

# The folder of the commands that came with this Python's packages.
COMMANDS = Path(sys.executable).parent


def flower_command(name: str) -> Path:
    """Return the path of one of Flower's commands."""
    command = COMMANDS / name
    if not command.exists():
        raise RunError(f"there is no {command}; install flwr beside this program")
    return command


_INCREMENTAL = 2
_BUSY_S = 5.0
_LOGS_DAYS = 30
_STEP_PAGES = 2000  # given back at a time: others write in between
_SPARE_BYTES = 1_000_000
_UNFINISHED = (
    "SELECT run.run_id FROM run JOIN task ON task.task_id = run.primary_task_id "
    "WHERE task.finished_at IS NULL"
)
_LEFT_BEHIND = f"""
SELECT run.run_id FROM run WHERE run.run_id NOT IN ({_UNFINISHED}) AND (
    EXISTS (SELECT 1 FROM message_ins WHERE message_ins.run_id = run.run_id)
    OR EXISTS (SELECT 1 FROM run_objects WHERE run_objects.run_id = run.run_id)
    OR EXISTS (
        SELECT 1 FROM object_push_sessions AS one WHERE one.run_id = run.run_id))
"""
_NO_LONGER_NEEDED = (
    # A reply goes with what it answers; nobody looks for one without.
    "DELETE FROM message_res WHERE reply_to_message_id NOT IN "
    "(SELECT message_id FROM message_ins)",
    f"""DELETE FROM fab WHERE fab_hash NOT IN
    (SELECT fab_hash FROM run WHERE fab_hash IS NOT NULL AND run_id IN ({_UNFINISHED}))
    AND fab_hash NOT IN (SELECT fab_hash FROM federation_app)
    AND fab_hash NOT IN (SELECT fab_hash FROM task
    WHERE fab_hash IS NOT NULL AND finished_at IS NULL)""",
)
_OLD_LOGS = (
    "DELETE FROM task_logs WHERE task_id IN "
    "(SELECT task_id FROM task WHERE finished_at < ?)"
)


def prepare(path: Path) -> None:
    """Make ready a database that nobody has open: new, or of an earlier start."""
    with _opened(path) as database:
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _NO_LONGER_NEEDED:
                database.execute(statement)
            since = datetime.now(UTC) - timedelta(days=_LOGS_DAYS)
            database.execute(_OLD_LOGS, [since.isoformat(sep=" ")])
        if _number(database, "auto_vacuum") != _INCREMENTAL:
            # Takes effect with the whole file written anew: once.
            database.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            database.execute("VACUUM")
        _give_back(database)


def left_behind(path: Path) -> list[int]:
    """Return finished runs of which messages, objects or uploads are left."""
    with _opened(path) as database:
        # Flower's ids are unsigned, SQLite's numbers are not.
        return [run_id % 2**64 for (run_id,) in database.execute(_LEFT_BEHIND)]


def shrink(path: Path) -> None:
    """Give free pages back, unless a run is under way: it would need them again."""
    with _opened(path) as database:
        if not database.execute(_UNFINISHED).fetchone():
            _give_back(database)


def _give_back(database: sqlite3.Connection) -> None:
    file = database.execute("PRAGMA database_list").fetchone()[2]
    wal = Path(f"{file}-wal")
    spare = _number(database, "freelist_count") * _number(database, "page_size")
    written = wal.stat().st_size if wal.exists() else 0
    if max(spare, written) < _SPARE_BYTES:
        return
    for _ in range(_number(database, "freelist_count") // _STEP_PAGES + 1):
        # With execute, Python takes the first step of it alone: one page.
        database.executescript(f"PRAGMA incremental_vacuum({_STEP_PAGES})")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Each statement is a transaction of its own.
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        yield database
    finally:
        database.close()


logger = logging.getLogger(__name__)

# Some programs go through all that they may have, and the limit may be a billion.
_ENOUGH = 65_536


def allow_descriptors(needed: int) -> None:
    """Raise this process's limit as far as it goes; warn if it is below ``needed``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < needed:
        logger.warning(
            "this process may have %d files and connections open, and %d clients and "
            "strangers at once need %d: raise its limit (ulimit -n, LimitNOFILE)",
            soft,
            needed // 2,
            needed,
        )


# What Flower's commands call this server: ``flwr list federation``.
CONNECTION = "federation"


def write_connection(home: Path, control: Address, ca: Path | None) -> None:
    """Write ``config.toml`` into ``home``, which is ``FLWR_HOME`` of the operator."""
    known = json.dumps(str(ca))
    trust = "insecure = true" if ca is None else f"root-certificates = {known}"
    home.mkdir(parents=True, exist_ok=True)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f"address = {json.dumps(str(control))}\n{trust}\n"
    )
    write_atomically(home / "config.toml", text)


WARNINGS_VARIABLE = "KNNPER_WARNINGS"
"""Environment variable with the file to which runs write what the server's own log has
to say too: Flower keeps their logs in its database."""


@dataclass(frozen=True)
class LogFile:
    """The log and its earlier parts: ``NAME.1`` is the latest of them."""

    path: Path
    largest: int = 10_000_000
    num_kept: int = 3

    def put_aside(self) -> None:
        """Begin anew if the log is too large."""
        if not self.path.exists() or self.path.stat().st_size <= self.largest:
            return
        for number in range(self.num_kept, 1, -1):
            if self._part(number - 1).exists():
                self._part(number - 1).replace(self._part(number))
        shutil.copyfile(self.path, self._part(1))
        with self.path.open("r+b") as file:
            file.truncate()

    def read_from(self, position: int) -> tuple[list[str], int]:
        """Return the whole lines after a position, and the position behind them."""
        if not self.path.exists():
            return [], 0
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(position if position <= size else 0)
            begin = file.tell()
            text, end, _ = file.read().rpartition(b"\n")
        lines = text.decode(errors="replace").split("\n") if end else []
        return lines, begin + len(text) + len(end)

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


_PR_SET_CHILD_SUBREAPER = 36
_NOTE = "processes.json"


@dataclass(frozen=True)
class Note:
    """What a running server says of its processes, for `knnper fed doctor`."""

    superlink: int
    starts: int

    def write(self, state: Path) -> None:
        """Write the note into the server's state folder."""
        write_atomically(state / _NOTE, json.dumps(asdict(self)))

    @staticmethod
    def read(state: Path) -> tuple["Note", float] | None:
        """Return the note and how many seconds ago it was true; None without one."""
        try:
            found = Note(**parse_json((state / _NOTE).read_text()))
            return found, time.time() - (state / _NOTE).stat().st_mtime
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def is_true(state: Path) -> None:
        """Take down that the SuperLink answers, and is asked for runs to start."""
        with contextlib.suppress(OSError):
            os.utime(state / _NOTE)

    def lives(self) -> bool:
        """Whether the SuperLink's process is there, and is one."""
        with contextlib.suppress(OSError):
            return b"superlink" in Path(f"/proc/{self.superlink}/cmdline").read_bytes()
        return False


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """End all children, kindly first; wait until they are gone."""
    deadline = time.monotonic() + _HELPERS_SECONDS
    told: set[int] = set()
    while children := {child for child in _children() if not _reaped(child)}:
        late = time.monotonic() > deadline
        for child in children if late else children - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL if late else signal.SIGTERM)
        told |= children
        time.sleep(0.05)


def _children() -> set[int]:
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (process / "stat").read_text()
            # The command's name stands in parentheses and may hold any character.
            if int(status.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(process.name))
    return found


def _reaped(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


# Environment variable with the absolute path of the server's YAML file.
SERVER_FILE_VARIABLE = "KNNPER_SERVER"
_LOG_TAIL = 2000
_STOP_SECONDS = 10.0
_HELPERS_SECONDS = 5.0
_POLL_SECONDS = 0.1

# Flower ends idle connections after 5 s; one that is older is not used again.
_IDLE_SECONDS = 2.0
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)


def control_authority(settings: ServerSettings) -> Path | None:
    """Return the authority's certificate of Flower's own port; None without TLS."""
    return None if settings.insecure else _tls_folder(settings) / "ca.crt"


class SuperLink:
    """Starts, watches and stops the process."""

    def __init__(self, settings: ServerSettings, server_file: Path) -> None:
        self._settings = settings
        self._server_file = server_file
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._tls_folder = _tls_folder(settings)
        # Of the authority of Flower's own port; None without TLS.
        self.ca = control_authority(settings)
        self.address = str(settings.control_address)
        # The options with which Flower's commands reach it.
        trust = ("--root-certificates", str(self.ca))
        self.trust = ("--insecure",) if self.ca is None else trust
        self.folder = settings.state
        self.database = self.folder / "superlink.db"
        self.log = LogFile(self.folder / "superlink.log")
        # What the server's own log has to say too.
        self.warnings = LogFile(self.folder / "warnings.log")

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
        self,
        *command: str,
        inherited: Sequence[int] = (),
        more: Mapping[str, str] = MappingProxyType({}),
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
                env={**self._environment(), **more},
                cwd=self.folder,
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        if self._process is None:
            raise RunError("the SuperLink has not been started")
        return await self._process.wait()

    async def answers(self) -> None:
        """Wait until the process answers."""
        ended = asyncio.ensure_future(self.wait())
        try:
            async with self.client() as client:
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get("/health")).is_success:
                            return
                    await asyncio.wait([ended], timeout=_POLL_SECONDS)
                    if ended.done():
                        tail = self.log.path.read_text(errors="replace")[-_LOG_TAIL:]
                        raise RunError(
                            f"Flower's SuperLink ended with status {ended.result()} "
                            f"before it was ready; the end of {self.log.path}:\n{tail}"
                        )
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """End the process and its helpers, kindly first."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await asyncio.to_thread(end_children)

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
        address, folder = self._settings.control_address, self._tls_folder
        secured = [
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "superlink.crt")),
            *("--ssl-keyfile", str(folder / "superlink.key")),
            "--enable-supernode-auth",
        ]
        return [
            str(flower_command("flower-superlink")),
            *("--host", address.host, "--port", str(address.port)),
            *("--database", str(self.database)),
            "--disable-runtime-dependency-installation",
            # Without a flower-superexec; see knnper.server.link.superlink.
            *("--isolation", "process"),
            *(["--insecure"] if self._settings.insecure else secured),
        ]

    def _environment(self) -> dict[str, str]:
        paths = os.environ.get("PATH", os.defpath)
        return {
            **os.environ,
            # Flower looks for its helpers by name.
            "PATH": os.pathsep.join((str(COMMANDS), paths)),
            "FLWR_HOME": str(self._settings.flower_home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONUNBUFFERED": "1",
            SERVER_FILE_VARIABLE: str(self._server_file),
            WARNINGS_VARIABLE: str(self.warnings.path.resolve()),
        }


def _tls_folder(settings: ServerSettings) -> Path:
    return settings.flower_home / "tls"


# How long a run waits that was submitted with Flower's own command: asking costs Flower
# more than anything else while nothing is to be done. One of ours is announced.
_ASK_S = 3.0
_LOOK_S = 0.1
_SUBMITTED = "submitted"


def announce_run(state: Path) -> None:
    """Have the server whose state folder this is look for a run that was submitted."""
    # Without it the server looks by itself, up to three seconds later.
    with contextlib.suppress(OSError):
        write_atomically(state / _SUBMITTED, "")


class ServerApps:
    """The ServerApps' processes."""

    def __init__(self, superlink: SuperLink, follow: Callable[[int], None]) -> None:
        self._superlink = superlink
        self._follow = follow  # reads from a pipe for whom a ServerApp has messages
        self._watched: set[asyncio.Task[None]] = set()

    async def keep_starting(self) -> None:
        """Start each run's, until cancelled."""
        try:
            async with self._superlink.client() as client:
                while True:
                    found = await _acquired(client)
                    if found is not None:
                        Note.is_true(self._superlink.folder)
                    if found is None or not found.token:
                        await self._pause()
                    else:
                        await self._start(found)
        finally:
            for watching in self._watched:
                watching.cancel()

    async def _pause(self) -> None:
        """Wait until a run was announced, or for a while."""
        path, end = self._superlink.folder / _SUBMITTED, time.monotonic() + _ASK_S
        while time.monotonic() < end and not path.exists():
            await asyncio.sleep(_LOOK_S)
        path.unlink(missing_ok=True)

    async def _start(self, found: AcquireTaskResponse) -> None:
        superlink = self._superlink
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._follow(reading)
        try:
            with _in_memory(found.token.encode()) as token:
                process = await superlink.spawn(
                    str(flower_command(SERVER_APP)),
                    *("--runtime-api-address", superlink.address),
                    *("--token-file", f"/proc/self/fd/{token}"),
                    *superlink.trust,
                    inherited=(token, writing),
                    more={ANNOUNCEMENTS_VARIABLE: str(writing)},
                )
        finally:
            os.close(writing)
        watching = asyncio.create_task(_watch(process, found.task.run_id))
        self._watched.add(watching)
        watching.add_done_callback(self._watched.discard)


async def _watch(process: asyncio.subprocess.Process, run_id: int) -> None:
    status = await process.wait()
    if status:
        logger.error("the ServerApp of run %d ended with status %d", run_id, status)


async def _acquired(client: httpx.AsyncClient) -> AcquireTaskResponse | None:
    """Return a run that waits; None while the SuperLink does not answer."""
    body = AcquireTaskRequest(supported_task_types=[SERVER_APP])
    headers = {"content-type": PROTOBUF}
    try:
        answer = await client.post(
            ACQUIRE_TASK, content=body.SerializeToString(), headers=headers
        )
    except httpx.HTTPError:
        return None
    return AcquireTaskResponse.FromString(answer.content) if answer.is_success else None


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Give a file that has no name and is never on a disk."""
    descriptor = os.memfd_create("token")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)
