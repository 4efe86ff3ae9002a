"""Fine-tuning (FT): what a client is served, trained further on its own data.

Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019; a baseline of Marfoq et al. 2022 (section 5, there
FedAvg+), of Chen et al. 2023 (section 6, "+FT") and of
Mansour et al. 2020 (section 7, Finetune).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import PositiveFloat, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class FineTuningSettings(Settings):
    """How a client trains on.

    Attributes
    ----------
    num_epochs
        Passes over the client's training and validation data, 1 to 20.
    learning_rate
        Of the fine-tuning; null is the training section's rate in the last round.
    """

    num_epochs: PositiveInt = 1
    learning_rate: PositiveFloat | None = None


class FineTuning(Personalizer):
    """The served model, fine-tuned on the client's data."""

    title = "FT"
    source = "Jiang et al. 2019; Marfoq et al. 2022, section 5"
    unseen = "fine-tunes like any other client"
    needs_one_model = True
    trains = True

    settings: FineTuningSettings

    def __init__(
        self, task: Task, method: Method, settings: FineTuningSettings
    ) -> None:
        super().__init__(task, method, settings)
        last_rate = task.training.learning_rate_at(task.training.num_rounds)
        self._rate = settings.learning_rate or last_rate

    def _tuned(
        self, base: ModelPredictor, examples: Examples, rng: RandomKey
    ) -> Tensor:
        return local_sgd(
            self.task,
            base.weights,
            examples,
            self._rate,
            rng,
            num_epochs=self.settings.num_epochs,
            trainable=self.trained_weights(),
        ).weights

    def trained_weights(self) -> Tensor | None:
        """Return which weights are trained, bool (num_weights,); None is all."""
        return None

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        base = one_model(self.method.personalize(payload, client_state, data, rng))

        def alone() -> ModelPredictor:
            before = base.without_validation()
            weights = self._tuned(before, data.train, rng)
            return replace(before, weights=weights, trained_alone=None)

        weights = self._tuned(base, data.train_and_validation(), rng)
        return replace(base, weights=weights, trained_alone=alone)


def one_model(predictor: Predictor) -> ModelPredictor:
    """Return ``predictor`` as what it must be to be trained further."""
    if not isinstance(predictor, ModelPredictor):
        raise RunError(
            "expected a method that serves one model to each client, found one that "
            f"serves a {type(predictor).__name__}; choose another `personalization`"
        )
    return predictor
