"""What a site does when it is asked: as in a simulation, in time, with discretion."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from client.node.deadline import process_ends_after
from client.runtime import ClientRuntime
from client.site.discretion import (
    withheld_evaluation,
    withheld_results,
    withheld_update,
)
from knnper.config.errors import RunError
from strategies.core.evaluation import ClientResults, Evaluation
from strategies.core.method import Method

log = logging.getLogger("flwr")


def in_time(seconds: float, what: str) -> contextlib.AbstractContextManager[None]:
    """End this process when the block takes longer than ``seconds``; 0 is for ever."""
    return process_ends_after(seconds, what) if seconds else contextlib.nullcontext()


@dataclass(frozen=True)
class SitePlayer:
    """A runtime of one client, with what its site imposes on it.

    Attributes
    ----------
    name
        The only client that it plays.
    runtime
        Plays it.
    timeout_s
        When the server stops waiting; 0 if it does not.
    share_metrics
        Whether the server learns how the client does.
    """

    name: str
    runtime: ClientRuntime
    timeout_s: float
    share_metrics: bool

    @property
    def method(self) -> Method:
        """What the client does."""
        return self.runtime.method

    def train(
        self, client: str, payload: object, server_round: int, keep_round: int
    ) -> Any:
        """See `ClientRuntime.train`."""
        self._require_this([client])
        with self._in_time(f"training in round {server_round}"):
            update = self.runtime.train(client, payload, server_round, keep_round)
        return update if self.share_metrics else withheld_update(update)

    def validate(self, clients: Sequence[str], reference: object) -> Evaluation:
        """See `ClientRuntime.validate`; of no example where metrics are not shared."""
        self._require_this(clients)
        if not self.share_metrics:
            return withheld_evaluation()
        with self._in_time("an evaluation"):
            return self.runtime.validate(clients, reference)

    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        last_round: int,
    ) -> ClientResults:
        """See `ClientRuntime.personalize`."""
        self._require_this(clients)
        with self._in_time("the hand-over"):
            found = self.runtime.personalize(clients, payload, reference, last_round)
        for reason in found.failures.values():
            log.error("the model cannot be used here: %s", reason)
        return found if self.share_metrics else withheld_results(found)

    def _in_time(self, what: str) -> contextlib.AbstractContextManager[None]:
        return in_time(self.timeout_s, what)

    def _require_this(self, clients: Sequence[str]) -> None:
        if list(clients) != [self.name]:
            raise RunError(
                f"the server asked for {', '.join(clients)}, and this is {self.name}; "
                "two clients may go by one name"
            )
