"""Clients that were away, or that were not there at all, get the model too."""

import logging
import time
from dataclasses import dataclass, field, replace

from server.checkpoint import Checkpoint
from server.conduct import Conductor
from server.roster import Member, Roster
from server.sites.federation import SiteFederation

LOOK_EVERY_S = 1.0
TRY_AGAIN_S = 60.0
"""After this time a client that could not be handed the model is tried again."""

log = logging.getLogger("flwr")


@dataclass
class Latecomers:
    """Hands a trained model to whoever comes.

    Attributes
    ----------
    conductor
        Of the run.
    federation
        Its clients.
    trained
        What training ended with.
    """

    conductor: Conductor
    federation: SiteFederation
    trained: Checkpoint
    _try_at: dict[str, float] = field(default_factory=dict)

    def serve(self, roster: Roster, seconds: float) -> None:
        """Stay for ``seconds`` and hand the model to those who lack it.

        Parameters
        ----------
        roster
            The clients of the run. Any other is an unseen one, and joins them in the
            results.
        seconds
            How long; 0 is not at all.
        """
        until = time.monotonic() + seconds
        if seconds:
            log.info("staying for %.0f s, for clients that come late", seconds)
        while time.monotonic() < until and not self.federation.stop.is_set():
            roster = self._hand_over_to_those_here(roster)
            self.federation.stop.wait(LOOK_EVERY_S)

    def _hand_over_to_those_here(self, roster: Roster) -> Roster:
        waiting = self._waiting()
        if not waiting:
            return roster
        log.info("handing the model to %s", ", ".join(sorted(waiting)))
        joined = self._joined(roster, list(waiting.values()))
        handed = self.conductor.hand_over(self.trained, joined, to=waiting)
        retry_at = time.monotonic() + TRY_AGAIN_S
        self._try_at.update(dict.fromkeys(set(waiting) - set(handed), retry_at))
        return joined

    def _waiting(self) -> dict[str, Member]:
        """Return the clients that are here and lack the model."""
        self.federation.directory.refresh()
        done = self.conductor.folder.hand_overs.reported(self.trained.fingerprint)
        now = time.monotonic()
        return {
            name: member
            for name, member in self.federation.directory.members().items()
            if name not in done and self._try_at.get(name, now) <= now
        }

    def _joined(self, roster: Roster, members: list[Member]) -> Roster:
        """Return the roster with those who took no part in training, as unseen."""
        known = set(roster.names())
        new = [replace(one, seen=False) for one in members if one.name not in known]
        if not new:
            return roster
        joined = Roster.of([*roster.members, *new], roster.split)
        self.conductor.folder.write_roster(joined)
        return joined
