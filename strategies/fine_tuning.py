"""Fine-tuning (FT), a linear probe (LP), and FedAvg+: the served model trained further.

Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019; a baseline of Marfoq et al. 2022 (section 5: FedAvg+ is
FedAvg with fine-tuning on top), of Chen et al. 2023 (section 6, "+FT") and of Mansour
et al. 2020 (section 7, Finetune). The linear probe is from Chen et al. 2023, section 6:
"linear probe (LP) that trains a linear classifier only". Its head starts from the
served model's head.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.method import Personalizer
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FineTuningSettings(Settings):
    """The fine-tuning of a client.

    Attributes
    ----------
    num_epochs
        Passes over the client's training and validation data; useful from 1 to 20.
    learning_rate
        Learning rate of the fine-tuning; null is the training section's rate in the
        last round.
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

    def trained_weights(self, task: Task) -> Tensor | None:
        """Return the mask of the weights to train, (num_weights,); None is all."""
        return None

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        base = one_model(self.method.personalize(payload, client_state, data, rng))
        rate = self.settings.learning_rate or self.task.last_rate
        epochs, trainable = self.settings.num_epochs, self.trained_weights(base.task)

        def tuned(before: ModelPredictor, examples: Examples) -> ModelPredictor:
            weights = local_sgd(
                before.task,
                before.weights,
                examples,
                rate,
                rng,
                num_epochs=epochs,
                trainable=trainable,
            ).weights
            return replace(before, weights=weights, trained_alone=None)

        served = tuned(base, data.train_and_validation())
        return replace(
            served, trained_alone=lambda: tuned(base.without_validation(), data.train)
        )


def one_model(predictor: Predictor) -> ModelPredictor:
    """Return ``predictor`` as a single model; raise RunError if it is none."""
    if not isinstance(predictor, ModelPredictor):
        raise RunError(
            "expected a method that serves one model to each client, found one that "
            f"serves a {type(predictor).__name__}; choose another `personalization`"
        )
    return predictor


@dataclass(frozen=True)
class LinearProbeSettings(FineTuningSettings):
    """The training of a client's head.

    Attributes
    ----------
    num_epochs
        Passes over the client's training and validation data; 20 in the paper.
    learning_rate
        Learning rate of the head; null is the training section's rate in the last
        round. The paper's grid is 0.005, 0.01, 0.05.
    """

    num_epochs: PositiveInt = 20


class LinearProbe(FineTuning):
    """The served model with a head trained on the client's data."""

    name = "linear_probe"
    title = "LP"
    source = "Chen et al. 2023, section 6"
    unseen = "trains a head like any other client"

    settings: LinearProbeSettings

    @override
    def trained_weights(self, task: Task) -> Tensor:
        return task.head_mask


class FedAvgPlus(FedAvg):
    """The global model, fine-tuned on each client's data."""

    name = "fedavg_plus"
    title = "FedAvg+"
    source = "Jiang et al. 2019; Marfoq et al. 2022, section 5"
    unseen = "the global model, fine-tuned on the client's data"
    learns_from_validation = "all"
    reference_title = "FedAvg"
    personalization = "fine_tuning"
