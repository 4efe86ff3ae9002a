"""kNN-Per against an oracle by brute force, its ends, its store, on a tuned model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.datastore.index import INDEX_KINDS, ProductSettings, ScalarSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import KernelName, KnnPredictor
from knnper.datastore.tuning import EvidenceName, TuningSettings
from knnper.errors import ConfigError
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fine_tuning import FineTuningSettings
from knnper.strategies.knn_fine_tuned import FineTunedMemory, FineTunedMemorySettings
from knnper.strategies.knn_per import KnnSettings, LocalMemory, memorize
from tests.strategies.knn_per.small_task import (
    NUM_CLASSES,
    TASK,
    client,
    draw,
    oracle,
    served,
    stored_by,
)


def knn_per(task: Task, settings: KnnSettings) -> Method:
    return LocalMemory(task, FedAvg(task, NoSettings()), settings)


@pytest.mark.parametrize("kernel", ["paper", "squared"])
@pytest.mark.parametrize(("num_neighbors", "kernel_scale"), [(1, 1.0), (5, 0.2)])
def test_the_neighbours_alone_equal_the_oracle(
    kernel: KernelName, num_neighbors: int, kernel_scale: float
) -> None:
    settings = KnnSettings(num_neighbors, kernel, kernel_scale, knn_weights=(1.0,))
    data = client(40, 9)
    test = draw("test", 70)
    weights = TASK.initial_weights

    expected = oracle(
        stored_by(weights, data),
        data.train_and_validation().labels,
        TASK.embed(weights, test.images),
        settings,
    )
    found = served(data, settings)(test.images)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("num_images", [0, 1, 31, 32, 33, 65, 97, 129, 161, 193])
def test_the_global_model_alone_is_fedavg_bit_for_bit(num_images: int) -> None:
    settings = KnnSettings(knn_weights=(0.0,))
    data = client(20, 5)
    payload, rng = ModelPayload(TASK.initial_weights), RandomKey(1)
    ours = knn_per(TASK, settings).personalize(payload, None, data, rng)
    theirs = FedAvg(TASK, NoSettings()).personalize(payload, None, data, rng)
    images = draw("test", num_images).images

    assert torch.equal(ours(images), theirs(images))


def test_both_ends_and_the_middle_mix_the_same_two_distributions() -> None:
    data = client(20, 5)
    images = draw("test", 50).images
    knn, middle, alone = (
        served(data, KnnSettings(knn_weights=(knn_weight,)))(images)
        for knn_weight in (1.0, 0.3, 0.0)
    )

    torch.testing.assert_close(middle, 0.3 * knn + 0.7 * alone)
    torch.testing.assert_close(middle.sum(dim=1), torch.ones(50))


def test_a_client_whose_labels_are_its_own_relies_on_its_neighbours() -> None:
    data = client(80, 30)

    assert served(data, KnnSettings()).describe()["knn_weight"] > 0


def test_images_are_embedded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = TASK.model.module, []
    embed = module.embed

    def counting(x: Tensor) -> Tensor:
        seen.append(len(x))
        return embed(x)

    monkeypatch.setattr(module, "embed", counting)
    data = client(20, 5)
    predictor = served(data, KnnSettings())
    predictor(draw("test", 7).images)

    assert sorted(seen) == [5, 7, 20]


@pytest.mark.parametrize("knn_weights", [(0.0, 0.5), (0.3, 1.0), (1.0,)])
def test_a_client_without_data_serves_the_global_model(
    knn_weights: tuple[float, ...],
) -> None:
    data = client(0, 0)
    predictor = served(data, KnnSettings(knn_weights=knn_weights))
    images = draw("test", 50).images

    assert torch.equal(
        predictor(images), TASK.probabilities(TASK.initial_weights, images)
    )
    described = predictor.describe()
    assert (described["knn_weight"], described["num_stored"]) == (0.0, 0.0)


@pytest.mark.parametrize(("num_train", "num_validation"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("evidence", ["validation", "leave_one_out", "auto"])
def test_one_example_is_the_neighbour_of_everything(
    num_train: int, num_validation: int, evidence: EvidenceName
) -> None:
    data = client(num_train, num_validation)
    label = int(data.train_and_validation().labels[0])
    tuning = TuningSettings(evidence=evidence)
    predictor = served(data, KnnSettings(knn_weights=(0.5,), tuning=tuning))
    images = draw("test", 5).images
    alone = TASK.probabilities(TASK.initial_weights, images)

    assert predictor.describe()["num_stored"] == 1
    assert bool((predictor(images)[:, label] >= 0.5).all())
    torch.testing.assert_close(
        2 * predictor(images) - alone, torch.eye(NUM_CLASSES)[label].repeat(5, 1)
    )


def test_nothing_but_personalization_differs_from_fedavg() -> None:
    ours = knn_per(TASK, KnnSettings())
    theirs = FedAvg(TASK, NoSettings())

    assert ours.num_rounds == theirs.num_rounds
    assert (ours.state_type, ours.payload_type, ours.update_type) == (
        theirs.state_type,
        theirs.payload_type,
        theirs.update_type,
    )


def test_the_defaults_are_the_papers() -> None:
    settings = TypeAdapter(LocalMemory.settings_type).validate_json("{}")

    assert settings == KnnSettings(
        num_neighbors=10,
        kernel="paper",
        kernel_scale=1.0,
        knn_weights=(0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"knn_weights": []},
        {"knn_weights": [0.5, 1.5]},
        {"num_neighbors": 0},
        {"kernel": "cosine"},
        {"kernel_scale": 0.0},
        {"neighbours": 3},
        {"tuning": {"criterion": "f1"}},
        {"tuning": {"prior": [{"num_examples": 0, "knn_weight": 0.5}]}},
        {"tuning": {"prior_strength": -1}},
    ],
)
def test_settings_out_of_range_are_refused(wrong: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(KnnSettings).validate_json(json.dumps(wrong))

    assert [error["loc"][0] for error in caught.value.errors()] == list(wrong)


def test_the_index_that_is_set_is_searched() -> None:
    data = client(300, 60)
    images = draw("test", 20).images
    exact, coarse = (
        served(data, KnnSettings(knn_weights=(1.0,), store=store))
        for store in (StoreSettings(), StoreSettings(index=ScalarSettings()))
    )

    # 8 bits a number move the votes, but few of them to another label.
    found, expected = coarse(images), exact(images)
    assert not torch.equal(found, expected)
    assert (found.argmax(dim=1) == expected.argmax(dim=1)).float().mean() > 0.8


@pytest.mark.parametrize("name", INDEX_KINDS)
def test_any_index_leaves_examples_out(name: str) -> None:
    index = INDEX_KINDS[name]()
    tuning = TuningSettings(evidence="leave_one_out")
    store = StoreSettings(index=index)
    settings = KnnSettings(num_neighbors=1, tuning=tuning, store=store)
    image = draw("train", 1).images
    examples = Examples(image.repeat(NUM_CLASSES, 1, 1, 1), torch.arange(NUM_CLASSES))
    data = ClientData(examples, draw("validation", 0))

    assert served(data, settings).describe()["knn_weight"] == 0.0


def test_the_policy_says_what_is_stored() -> None:
    data = client(30, 10)
    images = draw("test", 20).images
    store = StoreSettings("fifo", capacity=12)
    settings = KnnSettings(knn_weights=(1.0,), store=store)
    kept = served(data, settings)

    assert kept.describe()["num_stored"] == 12.0
    weights = TASK.initial_weights
    last = stored_by(weights, data)[28:]
    labels = data.train_and_validation().labels[28:]
    expected = oracle(last, labels, TASK.embed(weights, images), settings)
    np.testing.assert_allclose(kept(images).numpy(), expected, atol=2e-6)


def test_chance_is_each_client_s_own_and_the_seed_s() -> None:
    data = client(60, 0)
    images = draw("test", 20).images

    def answers(client: str, seed: int) -> Tensor:
        store = StoreSettings("reservoir", capacity=15, seed=seed)
        settings = KnnSettings(knn_weights=(1.0,), store=store)
        rng = RandomKey(5).child(client)
        base = ModelPredictor(TASK, TASK.initial_weights)
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
    store: StoreSettings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalMemory(TASK, FedAvg(TASK, NoSettings()), KnnSettings(store=store))


KEY = RandomKey(5)
TUNING = FineTuningSettings(num_epochs=30, learning_rate=0.2)


def served_tuned(data: ClientData, **memory: Any) -> KnnPredictor:
    settings = FineTunedMemorySettings(TUNING, KnnSettings(**memory))
    method = FineTunedMemory(TASK, FedAvg(TASK, NoSettings()), settings)
    payload = ModelPayload(TASK.initial_weights)
    predictor = method.personalize(payload, None, data, KEY)
    assert isinstance(predictor, KnnPredictor)
    return predictor


def tuned(examples: Examples) -> Tensor:
    """Return the weights after fine-tuning as `TUNING` says."""
    start = TASK.initial_weights
    return local_sgd(TASK, start, examples, 0.2, KEY, num_epochs=30).weights


DATA = client(30, 10)


def test_the_memory_is_mixed_with_the_tuned_model() -> None:
    queries, both = draw("test", 20).images, DATA.train_and_validation()
    found = served_tuned(DATA, knn_weights=(0.0,))(queries)
    expected = TASK.probabilities(tuned(both), queries)
    untuned = TASK.probabilities(TASK.initial_weights, queries)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, untuned, atol=1e-2)


def test_the_tuned_models_embeddings_are_remembered() -> None:
    queries, both = draw("test", 20).images, DATA.train_and_validation()
    settings = KnnSettings(num_neighbors=5, knn_weights=(1.0,))
    found = served_tuned(DATA, num_neighbors=5, knn_weights=(1.0,))(queries)

    def by(weights: Tensor) -> Tensor:
        stored = stored_by(weights, DATA)
        asked = TASK.embed(weights, queries)
        return torch.from_numpy(oracle(stored, both.labels, asked, settings)).float()

    torch.testing.assert_close(found, by(tuned(both)), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, by(TASK.initial_weights), atol=1e-2)


def test_lambda_is_chosen_with_a_model_that_has_not_seen_validation() -> None:
    grid = tuple(step / 20 for step in range(20))
    memory = KnnSettings(knn_weights=grid, tuning=TuningSettings("log_loss"))
    # Labels that nothing tells of in advance: only who has seen them knows them.
    held_out = Examples(DATA.validation.images, DATA.validation.labels.flip(0))
    data = replace(DATA, validation=held_out)

    def best(weights: Tensor) -> float:
        """Return the λ with the least log-loss, with the training split as store."""
        embedded = [
            TASK.embed(weights, split.images) for split in (data.train, held_out)
        ]
        near = oracle(embedded[0], data.train.labels, embedded[1], memory)
        model = TASK.probabilities(weights, held_out.images).double()
        rows = [
            torch.lerp(model, torch.from_numpy(near), share)
            .gather(1, held_out.labels[:, None])
            .log()
            .sum()
            for share in grid
        ]
        return grid[int(torch.stack(rows).argmax())]

    alone = tuned(data.train)
    both = tuned(data.train_and_validation())
    found = served_tuned(data, knn_weights=grid, tuning=memory.tuning)
    assert found.knn_weight == best(alone) != best(both)
