"""Runs the server: SuperLink, gateway and registration, from start to end."""

import asyncio
import contextlib
import fcntl
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import uvloop

from knnper.config.errors import RunError
from server.link.authorized import AuthorizedFolder
from server.link.descriptors import allow_descriptors
from server.link.flower_home import write_connection
from server.link.gateway.application import Gateway
from server.link.gateway.listener import Limits, Listener, bind
from server.link.gateway.metering import Meter, Notices
from server.link.gateway.replies import Replies
from server.link.gateway.rules import Clients, Rules
from server.link.layout import LOCK
from server.link.permissions import keep_to_owner
from server.link.processes import adopt_orphans
from server.link.serverapps import ServerApps
from server.link.superlink import SuperLink
from server.link.upkeep import (
    Registrar,
    keep_certificate,
    keep_database_small,
    keep_log_small,
    keep_superlink,
    prepare_database,
    tell_warnings,
)
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BYTES_PER_MB = 1_000_000
# One to the client, one to Flower, one for its reply; some more for files.
_DESCRIPTORS = 3 * Limits().in_all + 100
_ADDRESS_PART, _KEYS_PART = 2, 8  # of the bytes in flight


def run_server(
    settings: ServerSettings, server_file: Path, on_ready: Callable[[], None]
) -> None:
    """Run the server until SIGTERM or SIGINT; leave no process behind.

    Parameters
    ----------
    settings
        Of the server, with absolute paths.
    server_file
        The file that they are from.
    on_ready
        Called once clients can connect.

    Raises
    ------
    RunError
        If an address is taken, another server uses the state folder, or the
        SuperLink does not start.
    """
    keep_to_owner(settings.state)
    allow_descriptors(_DESCRIPTORS)
    settings.authorized.mkdir(parents=True, exist_ok=True)
    with _sole_user(settings.state):
        bind(settings.control_address).close()
        with bind(settings.listen_address) as listening:
            supervisor = Supervisor(settings, server_file, listening)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(supervisor.run(on_ready))


class Supervisor:
    """Keeps SuperLink, gateway and registrations going.

    Parameters
    ----------
    settings, server_file
        As for `run_server`.
    listening
        The gateway's socket.
    """

    def __init__(
        self, settings: ServerSettings, server_file: Path, listening: socket.socket
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._superlink = SuperLink(settings, server_file)
        self._clients = Clients()
        self._registrar = Registrar(
            AuthorizedFolder(settings.authorized),
            settings.control_address,
            settings.roster_file,
            self._clients,
            by_key=not settings.insecure,
        )

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
        prepare_database(self._superlink.database)
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
            limits = Limits(per_address=settings.max_connections_per_address)
            gateway = self._gateway(upstream)
            listener = Listener(gateway, settings.tls, limits)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(listener.serve_until_cancelled(self._listening))
                tasks.create_task(gateway.replies.keep_tidy())
                tasks.create_task(keep_superlink(superlink))
                tasks.create_task(ServerApps(superlink).keep_starting())
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
        )


@contextlib.contextmanager
def _sole_user(state: Path) -> Iterator[None]:
    """Make sure that one server at a time uses the folder ``state``."""
    with (state / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"another server uses {state}; stop it, or choose another state folder"
            ) from error
        yield
