"""FedMedian: each weight is the median of the clients'.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, Definition 1 and Algorithm 1 (Option I), on
models where the paper has gradients:

    w_j ← median_k w_{k,j}    for each coordinate j

All updates of a round are held at once.

Every client counts the same, whatever its number of examples, as in the paper. Buffers
such as BatchNorm's running statistics are treated like parameters: a median lies
between what clients sent.
"""

from knnper.strategies.core.averaging import Updates, hold, median
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg


class FedMedian(FedAvg):
    """Each weight is the median of the clients'; for up to half bad clients."""

    title = "FedMedian"
    source = "Yin et al. 2018, Algorithm 1, Option I"
    holds_all_updates = True

    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        return ModelState(median(hold(updates)))
