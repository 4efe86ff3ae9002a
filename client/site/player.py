"""What a site does when it is asked: as in a simulation, in time, with discretion."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from client.node.deadline import Deadline
from client.runtime import ClientRuntime
from client.site.discretion import Discretion, withheld_evaluation
from client.site.limits import Limits
from knnper.config.errors import RefusedError, RunError
from strategies.core.evaluation import ClientResults, Evaluation
from strategies.core.method import Method

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class SitePlayer:
    """A runtime of one client, with what its site imposes on it.

    Attributes
    ----------
    name
        The only client that it plays.
    runtime
        Plays it.
    deadline
        When the server stops waiting.
    discretion
        What the server learns.
    limits
        What it may ask for.
    num_train
        Training examples of the client.
    trained
        Steps and examples of each local training of this process, as `Task.on_trained`
        is told of them.
    """

    name: str
    runtime: ClientRuntime
    deadline: Deadline
    discretion: Discretion
    limits: Limits
    num_train: int
    trained: list[tuple[int, float]]

    @property
    def method(self) -> Method:
        """What the client does."""
        return self.runtime.method

    def train(
        self,
        client: str,
        payload: object,
        server_round: int,
        state_round: int,
        keep_rounds: Sequence[int],
    ) -> Any:
        """See `ClientRuntime.train`.

        Raises
        ------
        RefusedError
            If the site's limits do not allow it, or not what came of it.
        """
        self._require_this([client])
        self.limits.require_training(self.num_train)
        # Before it is given: a kill cannot make it uncounted.
        self.limits.count("training")
        self.trained.clear()
        with self._doing(f"training in round {server_round}"):
            update = self.runtime.train(
                client, payload, server_round, state_round, keep_rounds
            )
        self.limits.require_behind(self.trained)
        return self.discretion.update(update)

    def validate(self, clients: Sequence[str], reference: object) -> Evaluation:
        """See `ClientRuntime.validate`; of no example where metrics are not shared.

        Raises
        ------
        RefusedError
            If the site has answered as often as it may.
        """
        self._require_this(clients)
        if not self.discretion.share_metrics:
            return withheld_evaluation()
        self.limits.count("validation")
        with self._doing("an evaluation"):
            return self.runtime.validate(clients, reference)

    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        state_rounds: Sequence[int],
    ) -> ClientResults:
        """See `ClientRuntime.personalize`; the model is taken, come what may.

        Its figures stay here once the site has answered as often as it may.
        """
        self._require_this(clients)
        discretion = self.discretion
        if discretion.share_metrics:
            try:
                self.limits.count("validation")
            except RefusedError:
                discretion = Discretion(share_metrics=False)
        with self._doing("the hand-over"):
            found = self.runtime.personalize(clients, payload, reference, state_rounds)
        for reason in found.failures.values():
            log.error("the model cannot be used here: %s", reason)
        return discretion.results(found)

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self.discretion.around(what), self.deadline.ends(what):
            yield
        log.info("%s took %.1f s", what, time.monotonic() - began)

    def _require_this(self, clients: Sequence[str]) -> None:
        if list(clients) != [self.name]:
            raise RunError(
                f"the server asked for {', '.join(clients)}, and this is {self.name}; "
                "two clients may go by one name"
            )
