"""Fine-tuning (FT): what a client is served, trained further on its own data.

Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019; a baseline of knn-per.txt (section 5, there FedAvg+),
of fedbasis-pflbed.txt (section 6, "+FT") and of
three-approaches-hypcluster-dapper-mapper.txt (section 7, Finetune).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import PositiveFloat, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, PersonalizerSpec, Predictor
from knnper.strategies.core.predictors import ModelPredictor
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


def fine_tuned(
    task: Task,
    method: Method,
    settings: FineTuningSettings,
    trainable: Tensor | None = None,
) -> Method:
    """Return ``method`` whose clients train on what they would be served.

    Parameters
    ----------
    task
        What is learned.
    method
        Serves one model a client.
    settings
        For how long, and at which rate.
    trainable
        Which weights are trained, bool of shape (num_weights,); None is all.
    """
    rate = settings.learning_rate
    if rate is None:
        rate = task.training.learning_rate_at(task.training.num_rounds)

    def tuned(base: ModelPredictor, examples: Examples, rng: RandomKey) -> Tensor:
        return local_sgd(
            task,
            base.weights,
            examples,
            rate,
            rng,
            num_epochs=settings.num_epochs,
            trainable=trainable,
        ).weights

    def personalize(
        payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        base = one_model(method.personalize(payload, client_state, data, rng))

        def alone() -> ModelPredictor:
            before = base.without_validation()
            weights = tuned(before, data.train, rng)
            return replace(before, weights=weights, trained_alone=None)

        weights = tuned(base, data.train_and_validation(), rng)
        return replace(base, weights=weights, trained_alone=alone)

    return replace(method, personalize=personalize, personalizes_by_inference=False)


def one_model(predictor: Predictor) -> ModelPredictor:
    """Return ``predictor`` as what it must be to be trained further.

    Raises
    ------
    RunError
        If it does not rest on one set of weights.
    """
    if not isinstance(predictor, ModelPredictor):
        raise RunError(
            "expected a method that serves one model to each client, found one that "
            f"serves a {type(predictor).__name__}; choose another `personalization`"
        )
    return predictor


ON_TOP = PersonalizerSpec(
    title="FT",
    summary="The served model, fine-tuned on the client's data.",
    source="Jiang et al. 2019; knn-per.txt, section 5",
    settings_type=FineTuningSettings,
    apply=fine_tuned,
    unseen="fine-tunes like any other client",
    needs_one_model=True,
)
