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
from server.link.gateway.allowed import Rules
from server.link.gateway.application import Gateway
from server.link.gateway.entrance import EntranceLimits
from server.link.gateway.explanation import Clients
from server.link.gateway.listener import Listener, bind, upstream_client
from server.link.layout import LOCK
from server.link.permissions import keep_to_owner
from server.link.processes import adopt_orphans
from server.link.superlink import SuperLink
from server.link.upkeep import (
    Registrar,
    keep_certificate,
    keep_log_small,
    keep_superlink,
    tell_warnings,
)
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BYTES_PER_MB = 1_000_000
# One to the client and one to Flower; some more for files.
_DESCRIPTORS = 2 * EntranceLimits().in_all + 100


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
        write_connection(
            self._settings.flower_home,
            self._settings.control_address,
            self._superlink.ca,
        )

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        settings, ca = self._settings, self._superlink.ca
        await self._superlink.start()
        await self._superlink.answers()
        await self._registrar.register(ca)
        async with upstream_client(settings.control_address, ca) as upstream:
            most = settings.max_connections_per_address
            limits = EntranceLimits(per_address=most)
            listener = Listener(self._gateway(upstream), settings.tls, limits)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(listener.serve_until_cancelled(self._listening))
                tasks.create_task(keep_superlink(self._superlink))
                for log in (self._superlink.log, self._superlink.warnings):
                    tasks.create_task(keep_log_small(log))
                tasks.create_task(tell_warnings(self._superlink.warnings))
                tasks.create_task(self._registrar.keep_registered(ca))
                tasks.create_task(keep_certificate(listener, settings.tls))
                on_ready()

    def _gateway(self, upstream: httpx.AsyncClient) -> Gateway:
        rules = Rules(
            self._settings.insecure, self._settings.max_request_mb * _BYTES_PER_MB
        )
        return Gateway(upstream, rules, self._clients, self._registrar.look)


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
