"""FedAvg+: the global model, fine-tuned at each client.

Jiang, Konečný, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", 2019; a baseline of knn-per.txt, section 5.
"""

from dataclasses import dataclass, replace

from knnper.config.ranges import PositiveFloat, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from strategies.core.local_sgd import local_sgd
from strategies.core.method import Method, MethodSpec, NoSettings
from strategies.core.model_predictor import ModelPredictor
from strategies.core.records import ModelPayload, NoState
from strategies.core.task import Task
from strategies.fedavg import fedavg


@dataclass(frozen=True)
class FineTuningSettings(Settings):
    """How a client fine-tunes the global model.

    Attributes
    ----------
    num_epochs
        Passes over the client's training and validation data, 1 to 10.
    learning_rate
        Of the fine-tuning; null is the training section's rate in the last round.
    """

    num_epochs: PositiveInt = 1
    learning_rate: PositiveFloat | None = None


def fedavg_plus(
    task: Task, settings: NoSettings, personalization: FineTuningSettings
) -> Method:
    """Return FedAvg on ``task`` with a fine-tuned model at each client."""
    rate = personalization.learning_rate
    if rate is None:
        rate = task.training.learning_rate_at(task.training.num_rounds)

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        tuned = local_sgd(
            task,
            payload.weights,
            data.train_and_validation(),
            rate,
            rng,
            num_epochs=personalization.num_epochs,
        )
        return ModelPredictor(task, tuned.weights)

    return replace(
        fedavg(task, settings, NoSettings()),
        personalize=personalize,
        personalizes_by_inference=False,
    )


SPEC = MethodSpec(
    title="FedAvg+",
    summary="The global model, fine-tuned on each client's data.",
    source="Jiang et al. 2019; knn-per.txt, section 5",
    build=fedavg_plus,
    upload="1",
    download="1",
    client_state="0",
    unseen="the global model, fine-tuned on the client's data",
    reference_title="FedAvg",
    personalization_type=FineTuningSettings,
)
