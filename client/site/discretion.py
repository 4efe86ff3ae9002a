"""What a site replies that keeps its figures to itself."""

import dataclasses
import math
from typing import Any

from strategies.core.evaluation import ClientResults, Evaluation


def withheld_results(results: ClientResults) -> ClientResults:
    """Return who has the model, and nothing about how it does there."""
    names = tuple(result.client for result in results.results)
    return ClientResults((), results.failures, withheld=names)


def withheld_evaluation() -> Evaluation:
    """Return the evaluation on no example at all."""
    return Evaluation(0, 0, 0.0, (), (), ())


def withheld_update(update: Any) -> Any:
    """Return a method's update without its loss.

    The number of examples stays: it is the update's weight in the mean.
    """
    return dataclasses.replace(update, train_loss=math.nan)
