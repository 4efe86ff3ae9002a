"""FedProx: FedAvg, with clients pulled towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Algorithm 2; Marfoq 2023 (talk). With the global model w of the
round, a client minimises f(y) + μ/2 ||y - w||² by steps

    y ← (y - η g(y) + η μ w) / (1 + η μ)

where g is the gradient of f, weight decay included, on a mini-batch.

Departures from the paper:

- The pull acts at the end of a step; see `pull` in `knnper.strategies.core.proximal`.
- The number of local steps is fixed; the paper allows any inexact solution.
- Clients are sampled uniformly and weighted by their examples, as in FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import Examples
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, Settings
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.training import LocalResult, local_sgd
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedProxSettings(Settings):
    """The pull towards the global model.

    Attributes
    ----------
    prox_weight
        μ; 0.001 to 1 in the paper. 0 is FedAvg.
    """

    prox_weight: NonNegativeFloat = 0.1


class FedProx(FedAvg):
    """One global model; clients are pulled towards it while they train."""

    title = "FedProx"
    sends_gradients_only = True
    needs_sgd = "its proximal step is that of SGD in closed form"
    source = "Li et al. 2020, Algorithm 2"

    settings: FedProxSettings

    @override
    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        decay = self.task.training.weight_decay
        towards = pull(weights, self.settings.prox_weight, rate, decay)
        return local_sgd(self.task, weights, examples, rate, rng, gradient_hook=towards)
