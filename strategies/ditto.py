"""Ditto: FedAvg, with a personal model that is pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1; the grid of λ is from Marfoq et al. 2022,
section 5. The global model w is FedAvg's. In each of its rounds a client also trains

    v ← argmin_v f(v) + λ/2 ||v - w||²,  from its last v, with the w of this round

The client uses the λ of a grid with the best v on its validation split. It therefore
trains and keeps one v for each value.

With λ = 0 a client that takes part in every round trains v as `local` does on the
training split; only the order of examples differs, by another random key. With λ → ∞
and without momentum the parameters of v are those of the last w. A seen client serves
the v of its last round, which was not trained on its validation split; an unseen client
trains v on both splits.

Departures from the paper:

- v is trained with the number of steps and the learning rate of w; the paper allows
  others.
- λ is chosen once, after the last round.
- The pull acts at the end of a step; see `pull` in `knnper.strategies.core.proximal`.
  Buffers such as BatchNorm's running statistics are not pulled.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.evaluation import evaluate
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import ALL_DIFFER, Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.records import ModelPayload, ModelUpdate, Record
from knnper.strategies.core.training import GradientHook, local_sgd

ProxWeights = Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1), ALL_DIFFER]


@dataclass(frozen=True)
class DittoSettings(Settings):
    """The pull of the personal models towards the global one.

    Attributes
    ----------
    prox_weights
        The values of λ that a client chooses from, all different; useful from 0.01 to
        10. The default is the grid of Marfoq et al. 2022. A client keeps and trains one
        model for each value.
    unseen_epochs
        Passes over its data in which an unseen client trains its personal model.
    """

    prox_weights: ProxWeights = (10.0, 1.0, 0.1, 0.01)
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class DittoClientState(Record):
    """The state that a client keeps between rounds."""

    # v for each value of λ, in the order of the settings: shape (num_weights,) each.
    personal: tuple[Tensor, ...]


class Ditto(Method):
    """Each client trains a personal model, pulled towards the global one."""

    title = "Ditto"
    needs_sgd = "its proximal step is that of SGD in closed form"
    source = "Li et al. 2021, Algorithm 1; Marfoq et al. 2022, section 5"
    client_state = "L (number of prox_weights)"
    unseen = "the global model, trained on the client's data and pulled back to it"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    chooses_on_validation = True
    reference_title = "FedAvg"
    ends_with_global_model = True
    client_state_type = DittoClientState

    settings: DittoSettings

    def _pulled_to(self, center: Tensor, weight: float, rate: float) -> GradientHook:
        return pull(center, weight, rate, self.task.training.weight_decay)

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: DittoClientState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[DittoClientState, ModelUpdate]:
        _, update = super().client_update(payload, None, data, server_round, rng)
        rate = self.task.training.learning_rate_at(server_round)
        personal = tuple(
            local_sgd(
                self.task,
                weights,
                data.train,
                rate,
                rng.child("personal"),
                gradient_hook=self._pulled_to(payload.weights, prox_weight, rate),
            ).weights
            for prox_weight, weights in self._models(payload, client_state).items()
        )
        return DittoClientState(personal), update

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: DittoClientState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        if client_state is None or not data.num_examples:
            return self._unseen_client(payload.weights, data, rng)
        return self._best(self._models(payload, client_state), data.validation)

    def _models(
        self, payload: ModelPayload, client_state: DittoClientState | None
    ) -> Mapping[float, Tensor]:
        """Return v by λ; in a client's first round the global model."""
        if client_state is None:
            return dict.fromkeys(self.settings.prox_weights, payload.weights)
        return dict(zip(self.settings.prox_weights, client_state.personal, strict=True))

    def _best(
        self, models: Mapping[float, Tensor], validation: Examples
    ) -> ModelPredictor:
        """Return the model with the most correct predictions; ties: the largest λ."""

        def merit(prox_weight: float) -> tuple[int, float]:
            predictor = ModelPredictor(self.task, models[prox_weight])
            return evaluate(predictor, validation).num_correct, prox_weight

        chosen = max(models, key=merit)
        return ModelPredictor(self.task, models[chosen], {"prox_weight": chosen})

    def _unseen_client(
        self, weights: Tensor, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        """Train v of an unseen client from w, pulled towards it."""
        rate, epochs = self.task.first_rate, self.settings.unseen_epochs

        def trained(prox_weight: float, examples: Examples) -> ModelPredictor:
            result = local_sgd(
                self.task,
                weights,
                examples,
                rate,
                rng,
                num_epochs=epochs,
                gradient_hook=self._pulled_to(weights, prox_weight, rate),
            )
            chosen = {"prox_weight": prox_weight}
            return ModelPredictor(self.task, result.weights, chosen)

        chosen = max(self.settings.prox_weights)
        if len(data.validation):
            grid = self.settings.prox_weights
            models = {
                prox_weight: trained(prox_weight, data.train).weights
                for prox_weight in grid
            }
            chosen = self._best(models, data.validation).chosen["prox_weight"]
        return on_both_splits(data, functools.partial(trained, chosen))
