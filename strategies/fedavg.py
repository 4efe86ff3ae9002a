"""FedAvg: one global model, the mean of what the clients trained.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1; aggregation as in
knn-per.txt, Eq. 13.
"""

from collections.abc import Sequence

from knnper.data.examples import ClientData
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import average_weights
from knnper.strategies.core.method import Method, MethodSpec, NoSettings, Predictor
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import (
    ModelPayload,
    ModelState,
    ModelUpdate,
    NoState,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


def fedavg(task: Task, settings: NoSettings) -> Method:
    """Return FedAvg on ``task``."""

    def init(clients: Sequence[str], rng: RandomKey) -> ModelState:
        return ModelState(task.initial_weights)

    def broadcast(state: ModelState, client_id: str, rng: RandomKey) -> ModelPayload:
        return ModelPayload(state.weights)

    def client_update(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, ModelUpdate]:
        rate = task.training.learning_rate_at(server_round)
        trained = local_sgd(task, payload.weights, data.train, rate, rng)
        update = ModelUpdate(trained.weights, len(data.train), trained.train_loss)
        return NoState(), update

    def personalize(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        return ModelPredictor(task, payload.weights)

    return Method(
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        aggregate=lambda state, updates: average_weights(updates),
        personalize=personalize,
        state_type=ModelState,
        payload_type=ModelPayload,
        update_type=ModelUpdate,
        num_rounds=task.training.num_rounds,
        serves_global_model=True,
        personalizes_by_inference=True,
    )


SPEC = MethodSpec(
    title="FedAvg",
    summary="One global model, the mean of the clients' models.",
    source="McMahan et al. 2017, Algorithm 1; knn-per.txt Eq. 13",
    build=fedavg,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="FedAvg",
    ends_with_global_model=True,
)
