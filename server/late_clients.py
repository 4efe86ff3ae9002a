"""Distribute a trained model to clients that were offline, or are new."""

import logging
import time
from dataclasses import dataclass, field, replace

from knnper.server.checkpoints import Checkpoint
from knnper.server.roster import Member, Roster
from knnper.server.run import Conductor
from knnper.server.sites import SiteFederation

LATE_CHECK_EVERY_S = 1.0
TRY_AGAIN_S = 60.0  # until a client that did not get the model is tried again

log = logging.getLogger("flwr")


@dataclass
class LateClients:
    """Distributes a trained model to clients that come late."""

    conductor: Conductor
    federation: SiteFederation
    trained: Checkpoint
    _try_at: dict[str, float] = field(default_factory=dict)

    def serve(self, roster: Roster, seconds: float) -> None:
        """Distribute the model for ``seconds`` to clients that do not have it."""
        until = time.monotonic() + seconds
        if seconds:
            log.info("staying for %.0f s, for clients that come late", seconds)
        while time.monotonic() < until and not self.federation.stop.is_set():
            roster = self._distribute_to_connected(roster)
            self.federation.stop.wait(LATE_CHECK_EVERY_S)

    def _distribute_to_connected(self, roster: Roster) -> Roster:
        waiting = self._waiting()
        if not waiting:
            return roster
        log.info("sending the model to %s", ", ".join(sorted(waiting)))
        joined = self._joined(roster, list(waiting.values()))
        served = self.conductor.distribute(self.trained, joined, to=waiting)
        retry_at = time.monotonic() + TRY_AGAIN_S
        self._try_at.update(dict.fromkeys(set(waiting) - set(served), retry_at))
        return joined

    def _waiting(self) -> dict[str, Member]:
        self.federation.directory.refresh()
        done = self.conductor.folder.distributed.reported(self.trained.fingerprint)
        now = time.monotonic()
        return {
            name: member
            for name, member in self.federation.directory.members().items()
            if name not in done and self._try_at.get(name, now) <= now
        }

    def _joined(self, roster: Roster, members: list[Member]) -> Roster:
        known = set(roster.names())
        new = [
            replace(member, seen=False)
            for member in members
            if member.name not in known
        ]
        if not new:
            return roster
        joined = Roster.of([*roster.members, *new], roster.split)
        self.conductor.folder.write_roster(joined)
        return joined
