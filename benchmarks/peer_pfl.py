"""pfl-research as a contender of `benchmarks.peers`, in an environment that has it.

Its FedAvg in one process, or one of several processes, which find each other by
``PFL_WORKER_ADDRESSES`` and ``PFL_WORKER_RANK`` (its guide "Fast distributed
simulations"). Users take turns (``minimize_reuse``) and are weighted by their images.
There is no validation cohort, privacy mechanism or printed metric.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from benchmarks.peer_process import Line, PeerTask, task_folder

# pfl evaluates clients before and after local training in the first round and then at
# this interval: only the warm-up round pays for it.
NEVER = sys.maxsize


class _Network(nn.Module):
    """A network with the two methods required by pfl; counts its steps."""

    def __init__(self, task: PeerTask) -> None:
        super().__init__()
        self.network = task.network
        self.num_steps = 0
        self._images = task.images

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        self.train()
        self.num_steps += 1
        logits = self.network(self._images.normalized(pixels))
        return functional.cross_entropy(logits, labels)

    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Any]:  # noqa: ARG002
        return {"none": Weighted(0, len(labels))}


class _Waiting(TrainingProcessCallback):  # type: ignore[misc]
    """Delays each round until it is requested; pfl's ``run`` makes all rounds."""

    def __init__(self, network: _Network) -> None:
        self._network = network
        self._line = Line(network.network.state_dict)

    def on_train_begin(self, *, model: Any) -> Any:  # noqa: ARG002
        if not self._line.wait():
            sys.exit()
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        self._line.answer(self._network.num_steps)
        self._network.num_steps = 0
        return not self._line.wait(), Metrics()


def main(folder: Path) -> None:
    """Make rounds on request."""
    task = PeerTask.load(folder)
    network = _Network(task)

    def user_data(client: int) -> Any:
        positions = task.clients[client]
        raw = (task.images.pixels[positions], task.images.labels[positions])
        return Dataset(raw, user_id=str(client))

    # All processes must choose the same users.
    np.random.seed(0)  # noqa: NPY002
    sampler = get_user_sampler("minimize_reuse", list(range(len(task.clients))))
    users = FederatedDataset(user_data, sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=NEVER,
            evaluation_frequency=NEVER,
            train_cohort_size=task.cohort_size,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(network, task.optimizer, SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=task.batch_size,
            local_num_epochs=1,
            local_learning_rate=task.learning_rate,
        ),
        callbacks=[_Waiting(network)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(task_folder(__doc__))
