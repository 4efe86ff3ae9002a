"""Fed-MTL: each client trains its own model, pulled towards the mean of all.

Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning", NIPS 2017 (MOCHA),
with the relation between clients of Evgeniou, Pontil, "Regularized Multi-Task
Learning", KDD 2004, section 2, in which all are equally related. A baseline of Chen et
al. 2023, Eq. 3 and Table 6. With the models w_m of the clients m,

    min Σ_m (f_m(w_m) + λ/2 ||w_m - w̄||²),  w̄ the mean of the w_m

In a round a client continues to train its own w_m, in its first round w̄, pulled towards
the w̄ that it received. With λ = 0 and full participation this is local training: each
w_m starts from the common initial weights, and is that of `local` on the training split
for the same random keys. A seen client serves the w_m of its last round, which was not
trained on its validation split; an unseen client trains one from w̄ on both splits.

Departures from the papers:

- MOCHA solves convex problems in their dual and learns how clients are related; here
  the relation is fixed, and any model is trained with SGD.
- w̄ is the mean over the clients that replied, weighted by their examples.
- The pull acts at the end of a step; see `pull` in `knnper.strategies.core.proximal`.
  Buffers such as BatchNorm's running statistics are averaged into w̄, but not pulled.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.core.training import GradientHook, local_sgd


@dataclass(frozen=True)
class FedMTLSettings(Settings):
    """The pull of the clients' models towards their mean.

    Attributes
    ----------
    prox_weight
        λ; useful from 0.001 to 10. 0 is local training.
    unseen_epochs
        Passes over its data in which an unseen client trains its model.
    """

    prox_weight: NonNegativeFloat = 1.0
    unseen_epochs: PositiveInt = 10


class FedMTL(Method):
    """Each client trains its own model, pulled towards the mean of all."""

    title = "Fed-MTL"
    needs_sgd = "its proximal step is that of SGD in closed form"
    source = "Smith et al. 2017, mean-regularised; Chen et al. 2023, Table 6"
    client_state = "1"
    unseen = "the mean model, trained on the client's data and pulled back to it"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = "Fed-MTL (mean model)"
    client_state_type = ModelState

    settings: FedMTLSettings

    def _pulled_to(self, mean: Tensor, rate: float) -> GradientHook:
        return pull(
            mean, self.settings.prox_weight, rate, self.task.training.weight_decay
        )

    def training_options(
        self, payload: Any, rate: float, server_round: int
    ) -> dict[str, Any]:
        """Return further arguments of `local_sgd` in a round."""
        return {"gradient_hook": self._pulled_to(payload.weights, rate)}

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: ModelState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ModelState, ModelUpdate]:
        start = payload.weights if client_state is None else client_state.weights
        rate = self.task.training.learning_rate_at(server_round)
        options = self.training_options(payload, rate, server_round)
        trained = local_sgd(self.task, start, data.train, rate, rng, **options)
        return ModelState(trained.weights), trained.update(len(data.train))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: ModelState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        if client_state is not None and data.num_examples:
            return ModelPredictor(self.task, client_state.weights)
        rate = self.task.first_rate
        return trained_on_both_splits(
            self.task,
            payload.weights,
            data,
            rng,
            num_epochs=self.settings.unseen_epochs,
            learning_rate=rate,
            gradient_hook=self._pulled_to(payload.weights, rate),
        )
