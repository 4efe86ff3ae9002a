"""FedBABU: a shared body, trained under a fixed random head.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image
Classification", ICLR 2022, Algorithm 1. With the initial head h_0, which is neither
trained nor sent, a participant i computes

    φ_i ← SGD on f_i(h_0, ·) from φ

and the server takes φ = Σ_i (n_i / Σ n) φ_i. After the last round every client, seen or
unseen, fine-tunes (h_0, φ), or one of the two, on its own data.

Departures from the paper:

- Clients are weighted by their examples. The authors' code weights them equally, with
  clients of equal size.
- If the model starts from a file of weights with a head, h_0 is that head.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt, PositiveFloat, Settings
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, NoState
from knnper.strategies.core.sharing import PartlyShared, SharedUpdate
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult, local_sgd


@dataclass(frozen=True)
class FedBABUSettings(Settings):
    """The fine-tuning after the last round.

    Attributes
    ----------
    fine_tuned
        The part that is trained; ``all`` in the authors' code.
    fine_tuning_epochs
        Passes over the client's training and validation data; useful from 1 to 20, 5 in
        the authors' code. 0 serves the shared model, as a base for a personalisation.
    fine_tuning_learning_rate
        Learning rate of these passes; null is the training section's rate in the last
        round, as in the authors' code.
    """

    fine_tuned: Literal["all", "head", "body"] = "all"
    fine_tuning_epochs: NonNegativeInt = 5
    fine_tuning_learning_rate: PositiveFloat | None = None


class FedBABU(PartlyShared):
    """A shared body under a fixed random head, fine-tuned on each client's data."""

    title = "FedBABU"
    source = "Oh et al. 2022, Algorithm 1"
    upload = "< 1 (all but the head)"
    unseen = "the global model, fine-tuned on the client's data"
    learns_from_validation = "all"
    reference_title = "FedBABU (before fine-tuning)"
    ends_with_global_model = True
    sends_gradients_only = True
    client_state_type = NoState

    settings: FedBABUSettings

    def __init__(self, task: Task, settings: FedBABUSettings) -> None:
        body, epochs = ~task.head_mask, settings.fine_tuning_epochs
        super().__init__(task, settings, body, epochs)

    @override
    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        return local_sgd(self.task, weights, examples, rate, rng, trainable=self.shared)

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, SharedUpdate]:
        _, update = super().client_update(payload, None, data, server_round, rng)
        return NoState(), update

    @override
    def personalize(
        self, payload: ModelPayload, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        parts = {"all": None, "head": self.personal, "body": self.shared}
        return trained_on_both_splits(
            self.task,
            payload.weights,
            data,
            rng,
            num_epochs=self.settings.fine_tuning_epochs,
            learning_rate=(
                self.settings.fine_tuning_learning_rate or self.task.last_rate
            ),
            trainable=parts[self.settings.fine_tuned],
        )
