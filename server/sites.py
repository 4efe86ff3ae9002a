"""Real clients, which may be offline."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from knnper.errors import RunError
from knnper.experiment import FederationSettings
from knnper.server.directory import Directory
from knnper.server.federation import LiveFederation, Reply, Request, Step
from knnper.server.flower_federation import FlowerFederation
from knnper.server.roster import Member
from knnper.transport.polling import Interrupted, Patience

Enough = Callable[[dict[str, Member]], bool]

# How the server waits for replies of clients on other machines.
OVER_NETWORK = Patience(longest_interval_s=0.5, polls_of_first=1, may_be_away=True)
LOOK_EVERY_S = 0.2
REMIND_EVERY_S = 30.0

log = logging.getLogger("flwr")


@dataclass
class SiteFederation(LiveFederation):
    """Real clients, which are sent requests by name while they are online.

    The outcome of each exchange goes to the recorder of the directory, for an audit
    log; replies that are not waited for are in the entries of their rounds.
    """

    directory: Directory
    messenger: FlowerFederation
    settings: FederationSettings
    stop: threading.Event = field(default_factory=threading.Event)
    may_be_away: bool = True
    trusts_clients: bool = False
    _missing_since: dict[str, float] = field(default_factory=dict)
    _could_not_begin: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round_attempts = self.settings.round_attempts

    @override
    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        """Offline clients come last, as failures."""
        # The reason of each client's failure, empty if there was none.
        outcomes: dict[str, str] = {}
        try:
            for reply in self._exchange(step, requests):
                outcomes.update(dict.fromkeys(reply.clients, reply.failure or ""))
                yield reply
        finally:
            if outcomes:
                failed = {
                    name: failure for name, failure in outcomes.items() if failure
                }
                self.directory.record(
                    "exchange",
                    purpose=step.purpose,
                    round=step.server_round,
                    answered=[name for name in outcomes if name not in failed],
                    failed=failed,
                )

    def _exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        self.directory.refresh()
        away: list[str] = []

        def reachable() -> Iterator[Request]:
            for request in requests:
                for number, client in enumerate(request.clients):
                    if self.directory.node_of(client) is None:
                        away.append(client)
                        continue
                    state_round = request.state_rounds[number : number + 1]
                    yield replace(request, clients=(client,), state_rounds=state_round)

        yield from self.messenger.exchange(step, reachable())
        for client in away:
            yield Reply((client,), None, "it is not connected")

    @override
    def is_available(self, client: str) -> bool:
        """Return whether a client was online at the last `Directory.refresh`."""
        return self.directory.node_of(client) is not None

    @override
    def begin(self, step: Step, request: Request) -> None:
        if self.is_available(request.client):
            self.messenger.begin(step, request)
        else:
            self._could_not_begin.append(
                Reply(request.clients, None, "it is not connected")
            )

    @override
    def answered(self) -> Sequence[Reply]:
        """Also updates the directory."""
        self.directory.refresh()
        failed, self._could_not_begin = self._could_not_begin, []
        return [*failed, *self.messenger.answered()]

    @override
    def require_client(self, clients: Sequence[str], waited_s: float) -> None:
        most_s = self.settings.wait_for_clients_s
        if waited_s > most_s:
            raise RunError(
                f"waited {most_s:g} s for one of {len(clients)} clients, found none. "
                "Find out why they are offline, and resume the run; "
                "run.federation.wait_for_clients_s is how long a run waits"
            )

    @override
    def await_clients(self, clients: Sequence[str], least: int) -> None:
        """Also waits for clients that have just disconnected, or are busy."""

        def enough(members: dict[str, Member]) -> bool:
            return sum(client in members for client in clients) >= least

        def all_expected(members: dict[str, Member]) -> bool:
            missing = [client for client in clients if client not in members]
            # A list, since each call notes since when a client is missing.
            hopeless = [not self._is_worth_waiting(client) for client in missing]
            return enough(members) and all(hopeless)

        self.directory.refresh()
        for client in self.directory.members():  # they have returned
            self._missing_since.pop(client, None)
        whom = f"{least} of {', '.join(clients)}"
        members = self._wait_until(all_expected, whom)
        if not enough(members):
            connected = sorted(set(clients) & set(members))
            raise RunError(
                f"waited {self.settings.wait_for_clients_s:g} s for {least} of "
                f"{len(clients)} clients, found {len(connected)} "
                f"({', '.join(connected) or 'none'}). Find out why the others are "
                "offline, and resume the run; run.federation.wait_for_clients_s is how "
                "long a run waits, run.max_failed_fraction how many clients a round "
                "can do without"
            )

    def gather(self) -> list[Member]:
        """Wait for enough clients to begin a run, and return them."""
        least = self.settings.min_clients
        expected = self.directory.registered()

        def enough(members: dict[str, Member]) -> bool:
            if least is not None:
                return len(members) >= least
            return bool(members) and expected <= set(members)

        whom = f"{least} clients" if least else ", ".join(sorted(expected)) or "any"
        members = self._wait_until(enough, whom)
        if len(members) < (least or 1):
            names = ", ".join(sorted(members)) or "none"
            refused = "".join(f"\n  - {reason}" for reason in self.directory.refused())
            raise RunError(
                f"expected at least {least or 1} clients within "
                f"{self.settings.wait_for_clients_s:g} s, found {len(members)} "
                f"({names}). Start more, or set run.federation.min_clients{refused}"
            )
        return list(members.values())

    def _is_worth_waiting(self, client: str) -> bool:
        """Return whether a missing client may connect soon."""
        now = time.monotonic()
        waited_s = now - self._missing_since.setdefault(client, now)
        if self.directory.is_silent(client):
            return waited_s < self.settings.wait_for_clients_s
        return waited_s < self.settings.grace_s

    def _wait_until(self, enough: Enough, whom: str) -> dict[str, Member]:
        """Return the connected clients once they are enough, or the time is over."""
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
                log.info(
                    "waiting for %s; online: %s", whom, ", ".join(members) or "none"
                )
                remind_at = now + REMIND_EVERY_S
            if self.stop.wait(LOOK_EVERY_S):
                raise Interrupted("stopped while waiting for clients")
