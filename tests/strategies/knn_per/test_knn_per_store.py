"""The store of a client of kNN-Per: its index, its policy, its seed."""

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.datastore.index_kinds import INDEX_KINDS, ProductSettings, ScalarSettings
from knnper.datastore.settings import StoreSettings
from knnper.datastore.tuning import TuningSettings
from knnper.errors import ConfigError
from knnper.seeding import RandomKey
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.knn_per import LocalMemory, memorize
from tests.strategies.knn_per.small_task import (
    NUM_CLASSES,
    Draw,
    oracle,
    served,
    stored_by,
)


def test_the_index_that_is_set_is_searched(tiny_task: Task, draw: Draw) -> None:
    data = ClientData(draw("train", 300), draw("validation", 60))
    images = draw("test", 20).images
    exact, coarse = (
        served(tiny_task, data, KnnSettings(knn_weights=(1.0,), store=store))
        for store in (StoreSettings(), StoreSettings(index=ScalarSettings()))
    )

    # 8 bits a number move the votes, but few of them to another label.
    found, expected = coarse(images), exact(images)
    assert not torch.equal(found, expected)
    assert (found.argmax(dim=1) == expected.argmax(dim=1)).float().mean() > 0.8


@pytest.mark.parametrize("name", INDEX_KINDS)
def test_any_index_leaves_examples_out(tiny_task: Task, draw: Draw, name: str) -> None:
    index = INDEX_KINDS[name]()
    tuning = TuningSettings(evidence="leave_one_out")
    store = StoreSettings(index=index)
    settings = KnnSettings(num_neighbors=1, tuning=tuning, store=store)
    image = draw("train", 1).images
    examples = Examples(image.repeat(NUM_CLASSES, 1, 1, 1), torch.arange(NUM_CLASSES))
    data = ClientData(examples, draw("validation", 0))

    assert served(tiny_task, data, settings).describe()["knn_weight"] == 0.0


def test_the_policy_says_what_is_stored(tiny_task: Task, draw: Draw) -> None:
    data = ClientData(draw("train", 30), draw("validation", 10))
    images = draw("test", 20).images
    store = StoreSettings("fifo", capacity=12)
    settings = KnnSettings(knn_weights=(1.0,), store=store)
    kept = served(tiny_task, data, settings)

    assert kept.describe()["num_stored"] == 12.0
    weights = tiny_task.initial_weights
    last = stored_by(tiny_task, weights, data)[28:]
    labels = data.train_and_validation().labels[28:]
    expected = oracle(last, labels, tiny_task.embed(weights, images), settings)
    np.testing.assert_allclose(kept(images).numpy(), expected, atol=2e-6)


def test_chance_is_each_client_s_own_and_the_seed_s(
    tiny_task: Task, draw: Draw
) -> None:
    data = ClientData(draw("train", 60), draw("validation", 0))
    images = draw("test", 20).images

    def answers(client: str, seed: int) -> Tensor:
        store = StoreSettings("reservoir", capacity=15, seed=seed)
        settings = KnnSettings(knn_weights=(1.0,), store=store)
        rng = RandomKey(5).child(client)
        base = ModelPredictor(tiny_task, tiny_task.initial_weights)
        return memorize(base, NUM_CLASSES, data, settings, rng)(images)

    assert torch.equal(answers("one", 0), answers("one", 0))
    assert not torch.equal(answers("one", 0), answers("two", 0))
    assert not torch.equal(answers("one", 0), answers("one", 1))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (StoreSettings("fifo"), "capacity: found none with policy = fifo"),
        (StoreSettings(budget_mb=1e-6), "budget_mb"),
        (StoreSettings(index=ProductSettings(num_parts=7)), "num_parts"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_training(
    tiny_task: Task, store: StoreSettings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalMemory(
            tiny_task, FedAvg(tiny_task, NoSettings()), KnnSettings(store=store)
        )
