"""Runs the server: SuperLink, gateway and registration, from start to end.

When the SuperLink ends, the run in progress is lost, and the server ends with an error.
Starting it again is left to what starts services on the machine: a container's restart
policy, or systemd.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import uvloop

from knnper.errors import RunError
from knnper.files import FileLock, LockHeldError, require_plain
from knnper.server.link.arrivals import Arrivals
from knnper.server.link.authorized import AuthorizedFolder, Registered, Snapshot
from knnper.server.link.connections import ConnectionLimits
from knnper.server.link.gateway import Gateway
from knnper.server.link.gateway_rules import RegisteredClients, Rules
from knnper.server.link.listener import Listener
from knnper.server.link.notices import Notices
from knnper.server.link.registration import ControlPort, reconcile
from knnper.server.link.replies import Replies
from knnper.server.link.request_limits import Meter
from knnper.server.link.server_apps import ServerApps
from knnper.server.link.setup import LOCK, keep_to_owner
from knnper.server.link.superlink import (
    SuperLink,
    raise_descriptor_limit,
    write_connection,
)
from knnper.server.settings import ServerSettings, TlsFiles
from knnper.transport.sockets import listen

_LOOK_S = 0.5  # between looks at the folder of clients
_RETRY_S = 2.0  # after a registration that failed
_PAUSE_S = 1.0  # after every registration
_CERTIFICATE_S = 5.0  # between looks at the certificate's files
_BYTES_PER_MB = 1_000_000
# Part of the bytes in flight that one address, and one key, may have.
_ADDRESS_DIVISOR, _KEY_DIVISOR = 2, 8

logger = logging.getLogger(__name__)


def run_server(
    settings: ServerSettings, server_file: Path, on_ready: Callable[[], None]
) -> None:
    """Run the server until SIGTERM or SIGINT; leave no process behind.

    Raises
    ------
    RunError
        The SuperLink ended, or another server uses the same folder or address.
    """
    keep_to_owner(settings.state)
    require_plain(settings.state, but=("flwr", "runs"))
    raise_descriptor_limit()
    settings.authorized.mkdir(parents=True, exist_ok=True)
    with _sole_user(settings.state):
        # Refused now, rather than in the SuperLink's log.
        listen(settings.control_address.host, settings.control_address.port).close()
        with listen(
            settings.listen_address.host, settings.listen_address.port
        ) as listening:
            superlink = SuperLink(settings, server_file)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_run_until_stopped(settings, superlink, listening, on_ready))


async def _run_until_stopped(
    settings: ServerSettings,
    superlink: SuperLink,
    listening: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    superlink.write_certificates()
    write_connection(settings.flower_home, settings.control_address, superlink.ca)
    serving = asyncio.create_task(_serve(settings, superlink, listening, on_ready))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        await superlink.stop()
        logger.info("the server has stopped")


async def _serve(
    settings: ServerSettings,
    superlink: SuperLink,
    listening: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve until cancelled, or until the SuperLink ends."""
    await superlink.start()
    clients = RegisteredClients()
    registrar = Registrar(settings, clients)
    await registrar.register(superlink.ca)
    async with superlink.http_client() as upstream:
        gateway = _make_gateway(settings, upstream, clients, registrar)
        limits = ConnectionLimits(per_address=settings.max_connections_per_address)
        listener = Listener(gateway, settings.tls, limits)
        apps = ServerApps(superlink, gateway.arrivals.follow)
        with _forwarding_errors():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_fail_with(superlink))
                tasks.create_task(listener.serve_until_cancelled(listening))
                tasks.create_task(gateway.replies.keep_tidy())
                tasks.create_task(apps.keep_starting())
                tasks.create_task(apps.keep_deleting(gateway.replies))
                tasks.create_task(registrar.keep_registered(superlink.ca))
                tasks.create_task(_keep_certificate(listener, settings.tls))
                on_ready()


@contextlib.contextmanager
def _forwarding_errors() -> Iterator[None]:
    """Raise the first error of a task group without the group around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def _fail_with(superlink: SuperLink) -> None:
    status = await superlink.wait()
    raise RunError(
        f"Flower's SuperLink ended with status {status}; a run in progress has failed. "
        f"{superlink.log_file} has the reason. Start the server again, and submit the "
        "run again with --resume"
    )


def _make_gateway(
    settings: ServerSettings,
    upstream: httpx.AsyncClient,
    clients: RegisteredClients,
    registrar: "Registrar",
) -> Gateway:
    notices = Notices()
    largest = settings.max_request_mb * _BYTES_PER_MB
    in_flight = max(settings.max_in_flight_mb * _BYTES_PER_MB, largest)
    quota = settings.max_upload_mb
    return Gateway(
        upstream,
        Rules(settings.insecure, largest, clients),
        Replies(
            upstream,
            settings.state,
            None if quota is None else quota * _BYTES_PER_MB,
            notices.warn,
        ),
        Meter(
            in_flight,
            max(largest, in_flight // _ADDRESS_DIVISOR),
            max(largest, in_flight // _KEY_DIVISOR),
        ),
        registrar.look,
        notices,
        Arrivals(),
    )


class Registrar:
    """Registers the folder's clients when the folder changes, and on request."""

    def __init__(self, settings: ServerSettings, clients: RegisteredClients) -> None:
        self._settings, self._clients = settings, clients
        self._folder = AuthorizedFolder(settings.authorized)
        self._requested = asyncio.Event()
        self._registered: Snapshot | None = None

    def look(self) -> None:
        """Request another look: a client may have been added just now."""
        self._requested.set()

    async def register(self, ca: Path | None) -> None:
        """Bring Flower's registrations in line with the folder."""
        self._registered = self._folder.snapshot()
        self._clients.learn(await asyncio.to_thread(self._reconcile, ca))

    async def keep_registered(self, ca: Path | None) -> None:
        """Register whenever the folder has changed or `look` was called, for ever."""
        while True:
            while (
                self._folder.snapshot() == self._registered
                and not self._requested.is_set()
            ):
                await asyncio.sleep(_LOOK_S)
            self._requested.clear()
            try:
                await self.register(ca)
            except RunError as error:
                logger.warning("registrations were not looked at: %s", error)
                self._requested.set()  # again: the snapshot counts as registered
                await asyncio.sleep(_RETRY_S)
            # Unregistered clients call `look`, too, and must not keep the server busy.
            await asyncio.sleep(_PAUSE_S)

    def _reconcile(self, ca: Path | None) -> dict[str, Registered]:
        settings = self._settings
        with ControlPort(settings.control_address, ca) as control:
            return reconcile(
                self._folder,
                control,
                settings.roster_file,
                insecure=settings.insecure,
            )


async def _keep_certificate(listener: Listener, tls: TlsFiles | None) -> None:
    """Use a renewed certificate once its files were replaced, without a restart."""
    if tls is None:
        return
    modified = _modification_times(tls)
    while True:
        await asyncio.sleep(_CERTIFICATE_S)
        before, modified = modified, _modification_times(tls) or modified
        if modified == before:
            continue
        try:
            listener.renew()
            logger.info("the gateway uses the new certificate %s", tls.certificate)
        except OSError as error:
            logger.warning("the new certificate cannot be used: %s", error)


def _modification_times(tls: TlsFiles) -> tuple[int, int] | None:
    try:
        return tls.certificate.stat().st_mtime_ns, tls.key.stat().st_mtime_ns
    except FileNotFoundError:
        return None


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
