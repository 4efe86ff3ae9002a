"""Runs the server: SuperLink, gateway and registration, from start to end."""

import asyncio
import contextlib
import logging
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import uvloop

from knnper.errors import RunError, printable
from knnper.files import FileLock, LockHeldError, require_plain
from knnper.server.link import superlink as database
from knnper.server.link.arrivals import Arrivals
from knnper.server.link.authorized import AuthorizedFolder, Registered, Snapshot
from knnper.server.link.gateway import Gateway, Meter, Notices
from knnper.server.link.gateway_rules import Clients, Rules
from knnper.server.link.registration import ControlPort, reconcile
from knnper.server.link.replies import Replies
from knnper.server.link.setup import LOCK, keep_to_owner
from knnper.server.link.sockets import Listener, limits_for
from knnper.server.link.superlink import (
    LogFile,
    ServerApps,
    SuperLink,
    adopt_orphans,
    allow_descriptors,
    end_children,
    write_connection,
)
from knnper.server.settings import ServerSettings, TlsFiles
from knnper.transport.credentials import parse_address
from knnper.transport.sockets import listen

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 2.0
_REST_SECONDS = 1.0
_CERTIFICATE_SECONDS = 5.0
_LOG_SECONDS = 5.0
_DATABASE_SECONDS = 5.0
_FIRST_BACKOFF = 1.0
_LONGEST_BACKOFF = 30.0
_STABLE_SECONDS = 60.0


class Registrar:
    """Registers the clients of the folder, when it changes and when asked to look."""

    def __init__(self, settings: ServerSettings, clients: Clients) -> None:
        self._settings, self._clients = settings, clients
        self._folder = AuthorizedFolder(settings.authorized)
        self._wanted = asyncio.Event()
        self._seen: Snapshot | None = None

    def look(self) -> None:
        """Ask for another look: a client may have been registered by other means."""
        self._wanted.set()

    async def register(self, ca: Path | None) -> None:
        """Bring registrations in line with the folder."""
        self._seen = self._folder.snapshot()
        self._clients.learn(await asyncio.to_thread(self._reconcile, ca))

    async def keep_registered(self, ca: Path | None) -> None:
        """Do so whenever there is a reason to."""
        while True:
            await self._reason()
            try:
                await self.register(ca)
            except RunError as error:
                logger.warning("registrations were not looked at: %s", error)
                self._wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)
            await asyncio.sleep(_REST_SECONDS)  # strangers are a reason, too

    async def _reason(self) -> None:
        while self._folder.snapshot() == self._seen and not self._wanted.is_set():
            await asyncio.sleep(_LOOK_SECONDS)
        self._wanted.clear()

    def _reconcile(self, ca: Path | None) -> dict[str, Registered]:
        settings = self._settings
        with ControlPort(settings.control_address, ca) as control:
            return reconcile(
                self._folder,
                control,
                settings.roster_file,
                by_key=not settings.insecure,
            )


async def keep_superlink(superlink: SuperLink) -> None:
    """Start the SuperLink again whenever it ends; later each time it does so soon."""
    backoff = _FIRST_BACKOFF
    while True:
        started = time.monotonic()
        status = await superlink.wait()
        if time.monotonic() - started > _STABLE_SECONDS:
            backoff = _FIRST_BACKOFF
        logger.error(
            "Flower's SuperLink ended with status %d; a run in progress has failed. "
            "Starting it again in %.0f s; its log is %s",
            status,
            backoff,
            superlink.log.path,
        )
        await asyncio.to_thread(end_children)  # the ServerApps that it left behind
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, _LONGEST_BACKOFF)
        await superlink.start()
        try:
            await superlink.answers()
            logger.info("Flower's SuperLink runs again; registrations are kept")
        except RunError as error:
            logger.error("%s", error)


async def keep_database_small(superlink: SuperLink, replies: Replies) -> None:
    """Have what finished runs left behind removed, and the file shrink."""
    path, said = superlink.database, ""
    while True:
        await asyncio.sleep(_DATABASE_SECONDS)
        try:
            for run_id in await asyncio.to_thread(database.left_behind, path):
                replies.forget_run(run_id)
                # Of one that is asked for, Flower removes what is left.
                with ControlPort(
                    parse_address(superlink.address), superlink.ca
                ) as port:
                    await asyncio.to_thread(port.run_status, run_id)
            await asyncio.to_thread(database.shrink, path)
        except (sqlite3.Error, RunError) as error:
            # Of a busy database or a SuperLink that is away, the next look is in time.
            if str(error) != said:
                logger.warning("%s is not kept small: %s", path, error)
            said = str(error)


async def keep_log_small(log: LogFile) -> None:
    """Put the log aside whenever it has become too large."""
    while True:
        await asyncio.sleep(_LOG_SECONDS)
        try:
            await asyncio.to_thread(log.put_aside)
        except OSError as error:
            logger.warning("%s cannot be put aside: %s", log.path, error)


async def tell_warnings(log: LogFile) -> None:
    """Say in this log, too, what runs warn of from now on."""
    position = log.path.stat().st_size if log.path.exists() else 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            lines, position = await asyncio.to_thread(log.read_from, position)
        except OSError as error:
            logger.warning("%s cannot be read: %s", log.path, error)
            lines = []
        for line in lines:
            logger.warning("%s", printable(line))


async def keep_certificate(listener: Listener, tls: TlsFiles | None) -> None:
    """Use a new certificate, without a restart, once its files were replaced."""
    if tls is None:
        return
    seen = _modified(tls)
    while True:
        await asyncio.sleep(_CERTIFICATE_SECONDS)
        before, seen = seen, _modified(tls) or seen
        if seen == before:
            continue
        try:
            listener.renew()
            logger.info("the gateway uses the new certificate %s", tls.certificate)
        except OSError as error:
            logger.warning("the new certificate cannot be used: %s", error)


def _modified(tls: TlsFiles) -> tuple[int, int] | None:
    try:
        return tls.certificate.stat().st_mtime_ns, tls.key.stat().st_mtime_ns
    except FileNotFoundError:
        return None


_BYTES_PER_MB = 1_000_000

# One to the client, one to Flower, one for its reply; some more for files.
_DESCRIPTORS = 3 * limits_for(1).strangers + 100
_ADDRESS_PART, _KEYS_PART = 2, 8  # of the bytes in flight


def run_server(
    settings: ServerSettings, server_file: Path, on_ready: Callable[[], None]
) -> None:
    """Run the server until SIGTERM or SIGINT; leave no process behind."""
    keep_to_owner(settings.state)
    require_plain(settings.state, but=("flwr", "runs"))
    allow_descriptors(_DESCRIPTORS)
    settings.authorized.mkdir(parents=True, exist_ok=True)
    with _sole_user(settings.state):
        listen(settings.control_address.host, settings.control_address.port).close()
        with listen(
            settings.listen_address.host, settings.listen_address.port
        ) as listening:
            supervisor = Supervisor(settings, server_file, listening)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(supervisor.run(on_ready))


class Supervisor:
    """Keeps SuperLink, gateway and registrations going."""

    def __init__(
        self, settings: ServerSettings, server_file: Path, listening: socket.socket
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._superlink = SuperLink(settings, server_file)
        self._clients = Clients()
        self._registrar = Registrar(settings, self._clients)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Run until a signal comes."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        adopt_orphans()
        self._prepare()
        serving = asyncio.create_task(self._serve(on_ready))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            await self._superlink.stop()
            logger.info("the server has stopped")

    def _prepare(self) -> None:
        self._superlink.prepare()
        path = self._superlink.database
        try:
            database.prepare(path)
        except sqlite3.Error as error:
            logger.warning("%s is not kept small: %s", path, error)
        write_connection(
            self._settings.flower_home,
            self._settings.control_address,
            self._superlink.ca,
        )

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        settings, superlink = self._settings, self._superlink
        await superlink.start()
        await superlink.answers()
        await self._registrar.register(superlink.ca)
        async with superlink.client() as upstream:
            limits = limits_for(settings.max_connections_per_address)
            gateway = self._gateway(upstream)
            listener = Listener(gateway, settings.tls, limits)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(listener.serve_until_cancelled(self._listening))
                tasks.create_task(gateway.replies.keep_tidy())
                tasks.create_task(keep_superlink(superlink))
                apps = ServerApps(superlink, gateway.arrivals.follow)
                tasks.create_task(apps.keep_starting())
                for log in (superlink.log, superlink.warnings):
                    tasks.create_task(keep_log_small(log))
                tasks.create_task(tell_warnings(superlink.warnings))
                tasks.create_task(self._registrar.keep_registered(superlink.ca))
                tasks.create_task(keep_certificate(listener, settings.tls))
                tasks.create_task(keep_database_small(superlink, gateway.replies))
                on_ready()

    def _gateway(self, upstream: httpx.AsyncClient) -> Gateway:
        settings, notices = self._settings, Notices()
        largest = settings.max_request_mb * _BYTES_PER_MB
        in_all = max(settings.max_in_flight_mb * _BYTES_PER_MB, largest)
        parts = (max(largest, in_all // part) for part in (_ADDRESS_PART, _KEYS_PART))
        quota = settings.max_upload_mb
        return Gateway(
            upstream,
            Rules(settings.insecure, largest, self._clients),
            Replies(
                upstream,
                settings.state,
                None if quota is None else quota * _BYTES_PER_MB,
                notices.warn,
            ),
            Meter(in_all, *parts),
            self._registrar.look,
            notices,
            Arrivals(),
        )


@contextlib.contextmanager
def _sole_user(state: Path) -> Iterator[None]:
    try:
        lock = FileLock(state / LOCK)
    except LockHeldError as error:
        raise RunError(
            f"another server uses {state}; stop it, or choose another state folder"
        ) from error
    with lock:
        yield
