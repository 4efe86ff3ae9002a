"""kNN-Per + FT: memory and what it is mixed with are those of the tuned model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.datastore.prediction import KnnPredictor
from knnper.datastore.tuning import TuningSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fine_tuning import FineTuningSettings
from knnper.strategies.knn_fine_tuned import FineTunedMemory, FineTunedMemorySettings
from tests.strategies.knn_per.small_task import Draw, oracle, stored_by

KEY = RandomKey(5)
TUNING = FineTuningSettings(num_epochs=30, learning_rate=0.2)


def served(task: Task, data: ClientData, **memory: Any) -> KnnPredictor:
    settings = FineTunedMemorySettings(TUNING, KnnSettings(**memory))
    method = FineTunedMemory(task, FedAvg(task, NoSettings()), settings)
    payload = ModelPayload(task.initial_weights)
    predictor = method.personalize(payload, None, data, KEY)
    assert isinstance(predictor, KnnPredictor)
    return predictor


def tuned(task: Task, examples: Examples) -> Tensor:
    """Return the weights after fine-tuning as `TUNING` says."""
    start = task.initial_weights
    return local_sgd(task, start, examples, 0.2, KEY, num_epochs=30).weights


@pytest.fixture
def data(draw: Draw) -> ClientData:
    return ClientData(draw("train", 30), draw("validation", 10))


def test_the_memory_is_mixed_with_the_tuned_model(
    tiny_task: Task, data: ClientData, draw: Draw
) -> None:
    queries, both = draw("test", 20).images, data.train_and_validation()
    found = served(tiny_task, data, knn_weights=(0.0,))(queries)
    expected = tiny_task.probabilities(tuned(tiny_task, both), queries)
    untuned = tiny_task.probabilities(tiny_task.initial_weights, queries)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, untuned, atol=1e-2)


def test_the_tuned_models_embeddings_are_remembered(
    tiny_task: Task, data: ClientData, draw: Draw
) -> None:
    queries, both = draw("test", 20).images, data.train_and_validation()
    settings = KnnSettings(num_neighbors=5, knn_weights=(1.0,))
    found = served(tiny_task, data, num_neighbors=5, knn_weights=(1.0,))(queries)

    def by(weights: Tensor) -> Tensor:
        stored = stored_by(tiny_task, weights, data)
        asked = tiny_task.embed(weights, queries)
        return torch.from_numpy(oracle(stored, both.labels, asked, settings)).float()

    torch.testing.assert_close(found, by(tuned(tiny_task, both)), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, by(tiny_task.initial_weights), atol=1e-2)


def test_lambda_is_chosen_with_a_model_that_has_not_seen_validation(
    tiny_task: Task, data: ClientData
) -> None:
    grid = tuple(step / 20 for step in range(20))
    memory = KnnSettings(knn_weights=grid, tuning=TuningSettings("log_loss"))
    # Labels that nothing tells of in advance: only who has seen them knows them.
    held_out = Examples(data.validation.images, data.validation.labels.flip(0))
    data = replace(data, validation=held_out)

    def best(weights: Tensor) -> float:
        """Return the λ with the least log-loss, with the training split as store."""
        embedded = [
            tiny_task.embed(weights, split.images) for split in (data.train, held_out)
        ]
        near = oracle(embedded[0], data.train.labels, embedded[1], memory)
        model = tiny_task.probabilities(weights, held_out.images).double()
        rows = [
            torch.lerp(model, torch.from_numpy(near), share)
            .gather(1, held_out.labels[:, None])
            .log()
            .sum()
            for share in grid
        ]
        return grid[int(torch.stack(rows).argmax())]

    alone = tuned(tiny_task, data.train)
    both = tuned(tiny_task, data.train_and_validation())
    found = served(tiny_task, data, knn_weights=grid, tuning=memory.tuning)
    assert found.knn_weight == best(alone) != best(both)
