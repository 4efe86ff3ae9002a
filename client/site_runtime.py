"""The runtime of a site's client: limits, deadlines, and what the server may learn.

The text of an error can hold data of the site and goes to the site's own log. The
server gets the codes of `knnper.reasons`: every exception ends in
`MetricsPolicy.explain`.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from knnper.client.deadline import Deadline
from knnper.client.limits import Limits
from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.errors import KnnPerError, RefusedError, RunError, text_for_others
from knnper.reasons import Code, SafeReason
from knnper.strategies.core.evaluation import ClientResults, Evaluation, Validation

OWN_LOG = "the client's own log has the reason"

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class MetricsPolicy:
    """Whether a client's metrics and the reasons of its errors reach the server."""

    share_metrics: bool

    def explain(self, error: Exception, activity: str = "personalization") -> str:
        """Log an error in full; return the text that the server gets."""
        # `Limits` has logged what it refused.
        if isinstance(error, RefusedError):
            return text_for_others(error)
        is_known = isinstance(error, KnnPerError | OSError)
        log.error(
            "%s failed: %s", activity, error, exc_info=None if is_known else error
        )
        return text_for_others(error) if self.share_metrics else OWN_LOG

    def filter_update(self, update: Any) -> Any:
        """Remove the loss from an update, if metrics are not shared.

        The number of examples stays: it is the update's weight in the mean.
        """
        if self.share_metrics:
            return update
        return dataclasses.replace(update, train_loss=math.nan)

    def filter_results(self, results: ClientResults) -> ClientResults:
        """Replace results by the clients' names, if metrics are not shared."""
        if self.share_metrics:
            return results
        names = tuple(result.client for result in results.results)
        return ClientResults((), results.failures, withheld=names)


@dataclass(frozen=True, kw_only=True)
class SiteRuntime(ClientRuntime):
    """Runs one client, within the limits and the metrics policy of its site.

    Attributes
    ----------
    deadline
        When the server stops waiting for the reply; the process ends then.
    num_train
        Examples in the training split.
    trained
        Steps and effective examples of each local training, filled by the method.
    """

    name: str
    deadline: Deadline
    metrics_policy: MetricsPolicy
    limits: Limits
    num_train: int
    trained: list[tuple[int, float]]

    @override
    def train(self, request: TrainingRequest) -> Any:
        """Train within the limits."""
        require_own_name([request.client], self.name)
        self.limits.require_training(self.num_train)
        # Counted before it is given: a kill cannot undo it.
        self.limits.count("training")
        self.trained.clear()
        with self._within_deadline(f"training in round {request.server_round}"):
            update = super().train(request)
        return self.metrics_policy.filter_update(update)

    @override
    def _released(self, request: TrainingRequest, update: Any) -> Any:
        self.limits.require_enough(self.trained)
        # Before masking, which can fail: that it does depends on the update.
        self.limits.spend_privacy(request.server_round)
        return super()._released(request, update)

    @override
    def validate(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object | None = None,
        server_round: int = 0,
        state_rounds: Sequence[int] = (),
    ) -> Validation:
        """Validate within the limits; the result is empty if metrics are not shared."""
        require_own_name(clients, self.name)
        if not self.metrics_policy.share_metrics:
            return Validation(Evaluation(0, 0, 0.0, (), (), ()))
        self.limits.count("validation")
        with self._within_deadline("an evaluation"):
            return super().validate(
                clients, payload, reference, server_round, state_rounds
            )

    @override
    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        state_rounds: Sequence[int],
    ) -> ClientResults:
        """Take the model and personalise it.

        The model is taken even if no more answers with metrics are allowed; the figures
        then stay at the site.
        """
        require_own_name(clients, self.name)
        metrics_policy = self.metrics_policy
        if metrics_policy.share_metrics:
            try:
                self.limits.count("validation")
            except RefusedError:
                metrics_policy = MetricsPolicy(share_metrics=False)
        with self._within_deadline("the model distribution"):
            results = super().personalize(clients, payload, reference, state_rounds)
        predictions = self.predictions
        if predictions is not None and predictions.has(self.name):
            predictions.merge({self.name: self.name})
            predictions.forget_parts()
            log.info("the predictions of the test split are in %s", predictions.folder)
        return metrics_policy.filter_results(results)

    @contextlib.contextmanager
    def _within_deadline(self, activity: str) -> Iterator[None]:
        began = time.monotonic()
        with self.deadline.ends(activity):
            yield
        log.info("%s took %.1f s", activity, time.monotonic() - began)


def require_own_name(clients: Sequence[str], name: str) -> None:
    """Reject a request to other clients than the site's only one."""
    if list(clients) != [name]:
        raise RunError(
            f"the server asked for {', '.join(clients)}, and this is {name}",
            reason=SafeReason(Code.BAD_REQUEST),
        )
