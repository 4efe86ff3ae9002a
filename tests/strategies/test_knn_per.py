"""kNN-Per against a brute-force oracle, and its two ends: kNN alone, FedAvg alone."""

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from datastore.kernel import KernelName
from datastore.predictor import KnnPredictor
from knnper.config.sections import Choice, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData, Examples, InputSpec
from knnper.data.preprocess import Normalizer
from knnper.models.catalogue import build_model
from knnper.models.tiny_cnn import TinyCnnSettings
from strategies.core.method import NoSettings
from strategies.core.records import ModelPayload
from strategies.core.task import Task
from strategies.fedavg import fedavg
from strategies.knn_per import SPEC, KnnSettings, knn_per, memorize

NUM_CLASSES = 4
INPUT = InputSpec((8, 8, 1), NUM_CLASSES, mean=(0.5,), std=(0.3,))
Draw = Callable[[str, int], Examples]


@pytest.fixture(scope="module")
def tiny_task() -> Task:
    def fresh(rng: RandomKey) -> Tensor:
        return build_model(choice, INPUT, rng).read()

    choice = Choice("tiny_cnn", TinyCnnSettings())
    model = build_model(choice, INPUT, RandomKey(0))
    return Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=fresh,
        normalize=Normalizer(INPUT),
        spec=INPUT,
        training=TrainingSettings(),
        evaluation_batch_size=32,
    )


@pytest.fixture
def draw() -> Draw:
    """Draw examples; the first row of pixels tells the label."""

    def examples(purpose: str, count: int) -> Examples:
        generator = RandomKey(7, (purpose,)).numpy()
        images = generator.integers(0, 256, (count, 8, 8, 1), "uint8")
        labels = generator.integers(0, NUM_CLASSES, count)
        images[:, 0] = (85 * labels)[:, None, None]
        return Examples(torch.from_numpy(images), torch.from_numpy(labels))

    return examples


def oracle(
    stored: Tensor, labels: Tensor, queries: Tensor, settings: KnnSettings
) -> NDArray[np.float64]:
    """p_kNN by a loop over the queries; Eq. 6 in float64."""
    keys, asked = stored.double().numpy(), queries.double().numpy()
    probabilities = np.zeros((len(asked), NUM_CLASSES))
    for row, query in enumerate(asked):
        distances = np.sqrt(((keys - query) ** 2).sum(axis=1))
        nearest = np.argsort(distances, kind="stable")[: settings.num_neighbors]
        kept = distances[nearest]
        if settings.kernel == "squared":
            kept = kept**2 / keys.shape[1]
        weights = np.exp(-(kept - kept.min()) / settings.kernel_scale)
        np.add.at(probabilities[row], labels.numpy()[nearest], weights / weights.sum())
    return probabilities


def served(task: Task, data: ClientData, settings: KnnSettings) -> KnnPredictor:
    return memorize(task, task.initial_weights, data, settings)


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
    stored = data.train_and_validation()
    weights = tiny_task.initial_weights

    expected = oracle(
        tiny_task.embed(weights, stored.images),
        stored.labels,
        tiny_task.embed(weights, test.images),
        settings,
    )
    found = served(tiny_task, data, settings)(test.images)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


# With one image left for a last batch, the matrix product takes another path.
@pytest.mark.parametrize("num_images", [0, 1, 31, 32, 33, 65, 97, 129, 161, 193])
def test_the_global_model_alone_is_fedavg_bit_for_bit(
    tiny_task: Task, draw: Draw, num_images: int
) -> None:
    settings = KnnSettings(knn_weights=(0.0,))
    data = ClientData(draw("train", 20), draw("validation", 5))
    payload, rng = ModelPayload(tiny_task.initial_weights), RandomKey(1)
    ours = knn_per(tiny_task, NoSettings(), settings).personalize(
        payload, None, data, rng
    )
    theirs = fedavg(tiny_task, NoSettings(), NoSettings()).personalize(
        payload, None, data, rng
    )
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


def test_the_weight_is_tuned_with_the_training_split_only(
    tiny_task: Task, draw: Draw
) -> None:
    # Each validation image would find itself, with its own label, in the full store.
    train, validation = draw("train", 30), draw("validation", 10)
    mislabelled = Examples(validation.images, (validation.labels + 1) % NUM_CLASSES)
    grid = KnnSettings(num_neighbors=1, knn_weights=(0.0, 1.0))
    data = ClientData(train, mislabelled)
    weights = tiny_task.initial_weights
    knn = oracle(
        tiny_task.embed(weights, train.images),
        train.labels,
        tiny_task.embed(weights, mislabelled.images),
        grid,
    )
    model = tiny_task.probabilities(weights, mislabelled.images).numpy()
    num_right = [
        (scores.argmax(axis=1) == mislabelled.labels.numpy()).sum()
        for scores in (model, knn)
    ]

    assert num_right[1] <= num_right[0]  # so that 0 is right, and self-matches wrong
    assert served(tiny_task, data, grid).describe() == {
        "knn_weight": 0.0,
        "num_stored": 40.0,
    }


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
    assert predictor.describe() == {"knn_weight": 0.0, "num_stored": 0.0}


@pytest.mark.parametrize(("num_train", "num_validation"), [(1, 0), (0, 1)])
def test_one_example_is_the_neighbour_of_everything(
    tiny_task: Task, draw: Draw, num_train: int, num_validation: int
) -> None:
    data = ClientData(draw("train", num_train), draw("validation", num_validation))
    label = int(data.train_and_validation().labels[0])
    settings = KnnSettings(knn_weights=(1.0, 0.5))
    predictor = served(tiny_task, data, settings)
    images = draw("test", 5).images
    alone = tiny_task.probabilities(tiny_task.initial_weights, images)

    assert predictor.describe() == {"knn_weight": 0.5, "num_stored": 1.0}
    assert bool((predictor(images)[:, label] >= 0.5).all())
    torch.testing.assert_close(
        2 * predictor(images) - alone, torch.eye(NUM_CLASSES)[label].repeat(5, 1)
    )


def test_nothing_but_personalization_differs_from_fedavg(tiny_task: Task) -> None:
    ours = knn_per(tiny_task, NoSettings(), KnnSettings())
    theirs = fedavg(tiny_task, NoSettings(), NoSettings())

    assert ours.num_rounds == theirs.num_rounds
    assert (ours.state_type, ours.payload_type, ours.update_type) == (
        theirs.state_type,
        theirs.payload_type,
        theirs.update_type,
    )


def test_the_defaults_are_the_papers() -> None:
    settings = TypeAdapter(SPEC.personalization_type).validate_json("{}")

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
    ],
)
def test_settings_out_of_range_are_refused(wrong: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(KnnSettings).validate_json(json.dumps(wrong))

    assert [error["loc"][0] for error in caught.value.errors()] == list(wrong)
