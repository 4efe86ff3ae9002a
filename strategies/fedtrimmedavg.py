"""FedMedian and FedTrimmedAvg: each weight is a median or a trimmed mean.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, Definitions 1 and 2 and Algorithm 1. The paper
aggregates gradients; here models are aggregated, for each coordinate j:

    w_j ← median_k w_{k,j}                                     (Option I, FedMedian)
    w_j ← the mean of the w_{k,j} without the ⌊β n⌋ smallest
          and the ⌊β n⌋ largest of n                      (Option II, FedTrimmedAvg)

The server holds all updates of a round at once. As in the paper, every client counts
the same, whatever its number of examples: β = 0 is the plain mean, not FedAvg's.
Buffers such as BatchNorm's running statistics are treated like parameters, which is
safe, since the result lies between the clients' values.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from knnper.settings import Settings
from knnper.strategies.core.averaging import Updates, hold, median, trimmed_mean
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg


class FedMedian(FedAvg):
    """Each weight is the clients' median; robust to fewer than half bad clients."""

    name = "fedmedian"
    title = "FedMedian"
    source = "Yin et al. 2018, Algorithm 1, Option I"
    holds_all_updates = True

    @override
    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        return ModelState(median(hold(updates)))


@dataclass(frozen=True)
class FedTrimmedAvgSettings(Settings):
    """The values that the mean leaves out.

    Attributes
    ----------
    trimmed_fraction
        β, the fraction left out at each end, [0, ½); at least the fraction of bad
        clients. The default is Flower's.
    """

    trimmed_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.2


class FedTrimmedAvg(FedAvg):
    """Each weight is the clients' mean without the largest and smallest values."""

    title = "FedTrimmedAvg"
    source = "Yin et al. 2018, Algorithm 1, Option II"
    holds_all_updates = True

    settings: FedTrimmedAvgSettings

    @override
    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        held = hold(updates)
        num_trimmed = trimmed_at_each_end(self.settings.trimmed_fraction, len(held))
        return ModelState(trimmed_mean(held, num_trimmed))


def trimmed_at_each_end(fraction: float, num_values: int) -> int:
    """Return ⌊β n⌋, with β as a decimal number.

    The product of floats can be too small: 0.29 · 100 is 28.999...
    """
    most = (num_values - 1) // 2
    return min(math.floor(fraction * num_values + 1e-9), most)
