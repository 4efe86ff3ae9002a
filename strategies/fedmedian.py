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

from collections.abc import Iterable
from dataclasses import replace

from knnper.strategies.core.averaging import hold
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.robust import median
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


def fedmedian(task: Task, settings: NoSettings) -> Method:
    """Return FedMedian on ``task``."""

    def aggregate(
        state: ModelState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> ModelState:
        return ModelState(median(hold(updates)))

    return replace(fedavg(task, settings), aggregate=aggregate)


SPEC = MethodSpec(
    title="FedMedian",
    summary="Each weight is the median of the clients'; for up to half bad clients.",
    source="Yin et al. 2018, Algorithm 1, Option I",
    build=fedmedian,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="FedMedian",
    holds_all_updates=True,
    ends_with_global_model=True,
)
