"""Local: each client trains alone, from the common initial weights.

The baseline "Local" of Marfoq et al. 2022, section 5. There are no rounds: all training
happens in `personalize`. It takes as many steps as a client makes that takes part in
every round of FedAvg, with the same learning-rate schedule, on both splits of a client,
since the paper retrains its models on both.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.settings import PositiveInt, Settings
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class LocalSettings(Settings):
    """The length of the training.

    Attributes
    ----------
    num_rounds
        The amount of training, in rounds, 1 or more; null is ``training.num_rounds``,
        as for a client that takes part in every round.
    """

    num_rounds: PositiveInt | None = None


class Local(Method):
    """Each client trains its own model, without collaboration."""

    title = "Local"
    needs_num_rounds = "its clients train alone, outside of rounds"
    source = "Marfoq et al. 2022 section 5, baseline Local"
    upload = "0"
    download = "0"
    unseen = "trains a model of its own, like any other client"
    learns_from_validation = "all"
    reference_title = None

    settings: LocalSettings

    def __init__(self, task: Task, settings: LocalSettings) -> None:
        super().__init__(task, settings)
        self.num_rounds = 0

    @override
    def personalize(
        self, payload: ModelPayload, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        num_rounds = self.settings.num_rounds or self.task.training.num_rounds

        def train(examples: Examples) -> ModelPredictor:
            weights = payload.weights
            for server_round in range(1, num_rounds + 1):
                rate = self.task.training.learning_rate_at(server_round)
                round_rng = rng.child("round", server_round)
                weights = self.train(weights, examples, rate, round_rng).weights
            return ModelPredictor(self.task, weights)

        return on_both_splits(data, train)

    @override
    def client_update(self, *arguments: Any, **named: Any) -> NoReturn:
        raise RunError(
            "Local has no rounds of training: clients train in `personalize` only; "
            "run the method's `num_rounds`, which is 0"
        )

    aggregate = client_update
