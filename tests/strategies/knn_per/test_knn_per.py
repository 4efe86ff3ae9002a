"""kNN-Per against a brute-force oracle, and its two ends: kNN alone, FedAvg alone."""

import json
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.datastore.prediction import KernelName
from knnper.datastore.tuning import EvidenceName, TuningSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.knn_per import LocalMemory
from tests.strategies.knn_per.small_task import (
    NUM_CLASSES,
    Draw,
    oracle,
    served,
    stored_by,
)


def knn_per(task: Task, settings: KnnSettings) -> Method:
    return LocalMemory(task, FedAvg(task, NoSettings()), settings)


@pytest.mark.parametrize("kernel", ["paper", "squared"])
@pytest.mark.parametrize(("num_neighbors", "kernel_scale"), [(1, 1.0), (5, 0.2)])
def test_the_neighbours_alone_equal_the_oracle(
    tiny_task: Task,
    draw: Draw,
    kernel: KernelName,
    num_neighbors: int,
    kernel_scale: float,
) -> None:
    settings = KnnSettings(num_neighbors, kernel, kernel_scale, knn_weights=(1.0,))
    data = ClientData(draw("train", 40), draw("validation", 9))
    test = draw("test", 70)
    weights = tiny_task.initial_weights

    expected = oracle(
        stored_by(tiny_task, weights, data),
        data.train_and_validation().labels,
        tiny_task.embed(weights, test.images),
        settings,
    )
    found = served(tiny_task, data, settings)(test.images)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("num_images", [0, 1, 31, 32, 33, 65, 97, 129, 161, 193])
def test_the_global_model_alone_is_fedavg_bit_for_bit(
    tiny_task: Task, draw: Draw, num_images: int
) -> None:
    settings = KnnSettings(knn_weights=(0.0,))
    data = ClientData(draw("train", 20), draw("validation", 5))
    payload, rng = ModelPayload(tiny_task.initial_weights), RandomKey(1)
    ours = knn_per(tiny_task, settings).personalize(payload, None, data, rng)
    theirs = FedAvg(tiny_task, NoSettings()).personalize(payload, None, data, rng)
    images = draw("test", num_images).images

    assert torch.equal(ours(images), theirs(images))


def test_both_ends_and_the_middle_mix_the_same_two_distributions(
    tiny_task: Task, draw: Draw
) -> None:
    data = ClientData(draw("train", 20), draw("validation", 5))
    images = draw("test", 50).images
    knn, middle, alone = (
        served(tiny_task, data, KnnSettings(knn_weights=(knn_weight,)))(images)
        for knn_weight in (1.0, 0.3, 0.0)
    )

    torch.testing.assert_close(middle, 0.3 * knn + 0.7 * alone)
    torch.testing.assert_close(middle.sum(dim=1), torch.ones(50))


def test_a_client_whose_labels_are_its_own_relies_on_its_neighbours(
    tiny_task: Task, draw: Draw
) -> None:
    data = ClientData(draw("train", 80), draw("validation", 30))

    assert served(tiny_task, data, KnnSettings()).describe()["knn_weight"] > 0


def test_images_are_embedded_once(
    tiny_task: Task, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = tiny_task.model.module, []
    embed = module.embed

    def counting(x: Tensor) -> Tensor:
        seen.append(len(x))
        return embed(x)

    monkeypatch.setattr(module, "embed", counting)
    data = ClientData(draw("train", 20), draw("validation", 5))
    predictor = served(tiny_task, data, KnnSettings())
    predictor(draw("test", 7).images)

    assert sorted(seen) == [5, 7, 20]


@pytest.mark.parametrize("knn_weights", [(0.0, 0.5), (0.3, 1.0), (1.0,)])
def test_a_client_without_data_serves_the_global_model(
    tiny_task: Task, draw: Draw, knn_weights: tuple[float, ...]
) -> None:
    data = ClientData(draw("train", 0), draw("validation", 0))
    predictor = served(tiny_task, data, KnnSettings(knn_weights=knn_weights))
    images = draw("test", 50).images

    assert torch.equal(
        predictor(images), tiny_task.probabilities(tiny_task.initial_weights, images)
    )
    described = predictor.describe()
    assert (described["knn_weight"], described["num_stored"]) == (0.0, 0.0)


@pytest.mark.parametrize(("num_train", "num_validation"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("evidence", ["validation", "leave_one_out", "auto"])
def test_one_example_is_the_neighbour_of_everything(
    tiny_task: Task,
    draw: Draw,
    num_train: int,
    num_validation: int,
    evidence: EvidenceName,
) -> None:
    data = ClientData(draw("train", num_train), draw("validation", num_validation))
    label = int(data.train_and_validation().labels[0])
    tuning = TuningSettings(evidence=evidence)
    predictor = served(tiny_task, data, KnnSettings(knn_weights=(0.5,), tuning=tuning))
    images = draw("test", 5).images
    alone = tiny_task.probabilities(tiny_task.initial_weights, images)

    assert predictor.describe()["num_stored"] == 1
    assert bool((predictor(images)[:, label] >= 0.5).all())
    torch.testing.assert_close(
        2 * predictor(images) - alone, torch.eye(NUM_CLASSES)[label].repeat(5, 1)
    )


def test_nothing_but_personalization_differs_from_fedavg(tiny_task: Task) -> None:
    ours = knn_per(tiny_task, KnnSettings())
    theirs = FedAvg(tiny_task, NoSettings())

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
