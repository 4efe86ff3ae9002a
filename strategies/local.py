"""Local: every client trains alone, from the common initial weights.

The baseline "Local" of knn-per.txt, section 5. There are no rounds: all training
happens in `personalize`, as long as that of a client that takes part in every round
of FedAvg, with the same schedule of learning rates, on both of a client's splits: the
paper retrains its models on both together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, MethodSpec
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import (
    ModelPayload,
    ModelState,
    ModelUpdate,
    NoState,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd, on_both_splits


@dataclass(frozen=True)
class LocalSettings(Settings):
    """How long a client trains alone.

    Attributes
    ----------
    num_rounds
        Rounds' worth of local training, 1 or more; null is ``training.num_rounds``,
        what a client does that takes part in every round.
    """

    num_rounds: PositiveInt | None = None


def local(task: Task, settings: LocalSettings) -> Method:
    """Return local training on ``task``, without any collaboration."""
    num_rounds = settings.num_rounds or task.training.num_rounds

    def init(clients: Sequence[str], rng: RandomKey) -> ModelState:
        return ModelState(task.initial_weights)

    def broadcast(state: ModelState, client_id: str, rng: RandomKey) -> ModelPayload:
        return ModelPayload(state.weights)

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        def train(examples: Examples) -> ModelPredictor:
            weights = payload.weights
            for server_round in range(1, num_rounds + 1):
                rate = task.training.learning_rate_at(server_round)
                round_rng = rng.child("round", server_round)
                weights = local_sgd(task, weights, examples, rate, round_rng).weights
            return ModelPredictor(task, weights)

        return on_both_splits(data, train)

    return Method(
        init=init,
        broadcast=broadcast,
        client_update=_no_rounds,
        aggregate=_no_rounds,
        personalize=personalize,
        state_type=ModelState,
        payload_type=ModelPayload,
        update_type=ModelUpdate,
        num_rounds=0,
    )


def _no_rounds(*arguments: object) -> NoReturn:
    """Refuse to take part in a round.

    Raises
    ------
    RunError
        Always: a method with ``num_rounds`` 0 is never asked to.
    """
    raise RunError(
        "Local has no rounds of training: clients train in `personalize` only. "
        "Run as many rounds as the method's `num_rounds` says, which is 0"
    )


SPEC = MethodSpec(
    title="Local",
    summary="Every client trains a model of its own, without collaboration.",
    source="knn-per.txt section 5, baseline Local",
    build=local,
    upload="0",
    download="0",
    client_state="0",
    server_state="1",
    unseen="trains a model of its own, like any other client",
    reference_title=None,
    settings_type=LocalSettings,
)
