"""Fed-MTL: every client trains a model of its own, pulled towards the mean of them.

Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning", NIPS 2017 (MOCHA),
with the relation between clients that Evgeniou, Pontil, "Regularized Multi-Task
Learning", KDD 2004, section 2, take: all are equally near. A baseline of
Chen et al. 2023, Eq. 3 and Table 6. With the models w_m of the clients m,

    min Σ_m (f_m(w_m) + λ/2 ||w_m - w̄||²),  w̄ the mean of the w_m

In a round a client goes on with its own w_m, from w̄ on its first visit, pulled towards
the w̄ that it was sent. With λ = 0 and full participation that is local training: each
w_m starts from the common initial weights and nothing of the others reaches it, so it
is exactly `local`'s of the training split, given the same random keys. A seen client
serves its w_m of the last round, which never trained on its validation split; a
unseen client trains one from w̄ on both splits.

Departures: MOCHA solves convex problems in their dual and learns how clients are
related; here the relation is fixed, and any model is trained with SGD. w̄ is of the
clients that replied, weighted by their examples. The pull is taken at the end of a
step, see `knnper.strategies.core.training`. Buffers such as BatchNorm's running
statistics are averaged into w̄, but no client's are pulled.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knnper.data.examples import ClientData
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.core.task import ModelPredictor
from knnper.strategies.core.training import (
    GradientHook,
    local_sgd,
    pull,
    trained_on_both_splits,
)


@dataclass(frozen=True)
class FedMTLSettings(Settings):
    """How near the clients' models stay to each other.

    Attributes
    ----------
    prox_weight
        λ; 0 is local training.
    unseen_epochs
        Passes over its data with which an unseen client trains its model.
    """

    prox_weight: NonNegativeFloat = 1.0
    unseen_epochs: PositiveInt = 10


class FedMTL(Method):
    """Each client trains a model of its own, pulled towards the mean of all."""

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

    def how(self, payload: Any, rate: float, server_round: int) -> dict[str, Any]:
        """Return what `local_sgd` is told besides in a round."""
        return {"gradient_hook": self._pulled_to(payload.weights, rate)}

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
        options = self.how(payload, rate, server_round)
        trained = local_sgd(self.task, start, data.train, rate, rng, **options)
        return ModelState(trained.weights), trained.update(len(data.train))

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
