"""What goes on while the server runs: each coroutine runs until it is cancelled."""

import asyncio
import logging
import sqlite3
import time
from pathlib import Path

from knnper.config.address import Address, parse_address
from knnper.config.errors import RunError
from knnper.transport.foreign_text import printable
from server.link import database
from server.link.authorized import AuthorizedFolder, Snapshot
from server.link.control import ControlPort
from server.link.gateway.listener import Listener
from server.link.gateway.replies import Replies
from server.link.gateway.rules import Clients
from server.link.log_file import LogFile
from server.link.registration import reconcile
from server.link.roster_file import Registered
from server.link.superlink import SuperLink
from server.settings import TlsFiles

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
    """Registers the clients of the folder, when it changes and when asked to look.

    Parameters
    ----------
    folder
        The authorized keys.
    control
        Flower's own port.
    roster_file
        Where the clients are written.
    clients
        Is told of them.
    by_key
        Whether clients have to prove a key.
    """

    def __init__(
        self,
        folder: AuthorizedFolder,
        control: Address,
        roster_file: Path,
        clients: Clients,
        *,
        by_key: bool,
    ) -> None:
        self._folder = folder
        self._control = control
        self._roster_file = roster_file
        self._clients = clients
        self._by_key = by_key
        self._wanted = asyncio.Event()
        self._seen: Snapshot | None = None

    def look(self) -> None:
        """Ask for another look: a client may have been registered by other means."""
        self._wanted.set()

    async def register(self, ca: Path | None) -> None:
        """Bring registrations in line with the folder.

        Raises
        ------
        RunError
            If Flower cannot be reached, or there is no folder.
        """
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
        with ControlPort(self._control, ca) as control:
            return reconcile(
                self._folder, control, self._roster_file, by_key=self._by_key
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
        await superlink.end_helpers()
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, _LONGEST_BACKOFF)
        await superlink.start()
        try:
            await superlink.answers()
            logger.info("Flower's SuperLink runs again; registrations are kept")
        except RunError as error:
            logger.error("%s", error)


def prepare_database(path: Path) -> None:
    """Make the SuperLink's database ready, before that is started."""
    try:
        database.prepare(path)
    except sqlite3.Error as error:
        logger.warning("%s is not kept small: %s", path, error)


async def keep_database_small(superlink: SuperLink, replies: Replies) -> None:
    """Have what finished runs left behind removed, and the file shrink."""
    path, said = superlink.database, ""
    while True:
        await asyncio.sleep(_DATABASE_SECONDS)
        try:
            for run_id in await asyncio.to_thread(database.left_behind, path):
                replies.forget_run(run_id)
                await asyncio.to_thread(_have_flower_remove, superlink, run_id)
            await asyncio.to_thread(database.shrink, path)
        except (sqlite3.Error, RunError) as error:
            # Of a busy database or a SuperLink that is away, the next look is in time.
            if str(error) != said:
                logger.warning("%s is not kept small: %s", path, error)
            said = str(error)


def _have_flower_remove(superlink: SuperLink, run_id: int) -> None:
    """Ask for a finished run: Flower removes what is left of one that is asked for."""
    with ControlPort(parse_address(superlink.address), superlink.ca) as control:
        control.run_status(run_id)


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
        now = _modified(tls)
        if now == seen or now is None:
            continue
        seen = now
        try:
            listener.renew()
            logger.info("the gateway uses the new certificate %s", tls.certificate)
        except OSError as error:
            logger.warning("the new certificate cannot be used: %s", error)


def _modified(tls: TlsFiles) -> tuple[int, int] | None:
    """Return when both files were written; None while one is being replaced."""
    try:
        return tls.certificate.stat().st_mtime_ns, tls.key.stat().st_mtime_ns
    except FileNotFoundError:
        return None
