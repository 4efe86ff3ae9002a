"""A federation of clients that come and go."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from knnper.config.errors import RunError
from knnper.config.sections import FederationSettings
from knnper.transport.messages import Purpose
from knnper.transport.polling import Interrupted, Patience
from server.federation import Federation, Reply, Request
from server.flower_federation import FlowerFederation
from server.roster import Member
from server.sites.directory import Directory

OVER_NETWORK = Patience(longest_interval_s=0.5, looks_for_the_first=1, may_be_away=True)
"""How replies of clients on machines of their own are waited for."""

LOOK_EVERY_S = 0.2
REMIND_EVERY_S = 30.0

Enough = Callable[[dict[str, Member]], bool]

log = logging.getLogger("flwr")


@dataclass
class SiteFederation(Federation):
    """Clients that are reached by name while they are connected.

    Attributes
    ----------
    directory
        Who is behind which node.
    messenger
        Sends requests to nodes that are there.
    settings
        How long is waited.
    stop
        Ends waiting when it is set.
    """

    directory: Directory
    messenger: FlowerFederation
    settings: FederationSettings
    stop: threading.Event = field(default_factory=threading.Event)
    may_be_away: bool = True
    _missing_since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.round_attempts = self.settings.round_attempts

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_rounds: Sequence[int],
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """See `Federation.exchange`; those who are away come last, as failures."""
        self.directory.refresh()
        away: list[str] = []

        def reachable() -> Iterator[Request]:
            for request in requests:
                for number, client in enumerate(request.clients):
                    if self.directory.node_of(client) is None:
                        away.append(client)
                        continue
                    own = request.state_rounds[number : number + 1]
                    yield replace(request, clients=(client,), state_rounds=own)

        yield from self.messenger.exchange(
            purpose, server_round, keep_rounds, reachable()
        )
        for client in away:
            yield Reply((client,), None, "it is not connected")

    def await_clients(self, clients: Sequence[str], least: int) -> None:
        """See `Federation.await_clients`.

        Those who have just been lost are waited for, too, for ``grace_s`` after that;
        and those who are connected and busy: a run that is taken up goes on with the
        clients that it had.
        """

        def enough(members: dict[str, Member]) -> bool:
            return sum(client in members for client in clients) >= least

        def all_who_may_come(members: dict[str, Member]) -> bool:
            missing = [client for client in clients if client not in members]
            # Of each: none may stop the look at the others.
            hopeless = [not self._is_worth_waiting(client) for client in missing]
            return enough(members) and all(hopeless)

        self._forget_missing()
        whom = f"{least} of {', '.join(clients)}"
        members = self._wait_until(all_who_may_come, whom)
        if not enough(members):
            found = sorted(set(clients) & set(members))
            raise RunError(
                f"waited {self.settings.wait_for_clients_s:g} s for {least} of "
                f"{len(clients)} clients, found {len(found)} "
                f"({', '.join(found) or 'none'}). Look why the others are away, and "
                "resume the run; run.federation.wait_for_clients_s is how long is "
                "waited, run.max_failed_fraction how many a round can do without"
            )

    def gather(self) -> list[Member]:
        """Return the clients that are there to begin, once they are enough.

        These are ``min_clients``; where that is not set, all that are registered, or
        whoever of them came while the server waited.

        Raises
        ------
        RunError
            If too few come.
        """
        least = self.settings.min_clients
        expected = self.directory.registered()

        def enough(members: dict[str, Member]) -> bool:
            if least is not None:
                return len(members) >= least
            return bool(members) and expected <= set(members)

        whom = f"{least} clients" if least else ", ".join(sorted(expected)) or "any"
        members = self._wait_until(enough, whom)
        if len(members) < (least or 1):
            raise RunError(self._too_few(least or 1, members))
        return list(members.values())

    def _is_worth_waiting(self, client: str) -> bool:
        """Return whether a client that is missing may be about to come."""
        now = time.monotonic()
        waited_s = now - self._missing_since.setdefault(client, now)
        if self.directory.is_silent(client):
            return waited_s < self.settings.wait_for_clients_s
        return waited_s < self.settings.grace_s

    def _forget_missing(self) -> None:
        """Start anew with clients that are back."""
        self.directory.refresh()
        for client in self.directory.members():
            self._missing_since.pop(client, None)

    def _wait_until(self, enough: Enough, whom: str) -> dict[str, Member]:
        """Return who is there once they are enough, or when waiting was too long."""
        began = time.monotonic()
        remind_at = began
        while True:
            self.directory.refresh()
            members = self.directory.members()
            now = time.monotonic()
            too_long = now - began > self.settings.wait_for_clients_s
            if enough(members) or too_long:
                return members
            if now >= remind_at:
                log.info("waiting for %s; here: %s", whom, ", ".join(members) or "none")
                remind_at = now + REMIND_EVERY_S
            if self.stop.wait(LOOK_EVERY_S):
                raise Interrupted("stopped while waiting for clients")

    def _too_few(self, least: int, members: Iterable[str]) -> str:
        found = sorted(members)
        refused = "".join(f"\n  - {reason}" for reason in self.directory.refused())
        return (
            f"expected at least {least} clients within "
            f"{self.settings.wait_for_clients_s:g} s, found {len(found)} "
            f"({', '.join(found) or 'none'}). Start more, or set "
            f"run.federation.min_clients{refused}"
        )
