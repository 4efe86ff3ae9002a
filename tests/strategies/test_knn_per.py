"""kNN-Per against a brute-force oracle, and its two ends: kNN alone, FedAvg alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from datastore.index.catalogue import INDEX_KINDS
from datastore.index.quantized import ProductSettings, ScalarSettings
from datastore.prediction.kernel import KernelName
from datastore.prediction.predictor import KnnPredictor
from datastore.settings import StoreSettings
from datastore.tuning.settings import EvidenceName, PriorPoint, TuningSettings
from knnper.config.errors import ConfigError
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
    return memorize(task, task.initial_weights, data, settings, RandomKey(5))


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
        "num_held_out": 10.0,
        "num_left_out": 0.0,
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


@pytest.mark.parametrize(
    ("num_train", "num_validation", "evidence"),
    [
        (1, 0, "validation"),
        (20, 0, "validation"),
        (0, 20, "validation"),
        (1, 0, "leave_one_out"),
        (0, 1, "auto"),
        (0, 0, "auto"),
    ],
)
def test_without_evidence_the_client_does_as_expected_of_its_size(
    tiny_task: Task,
    draw: Draw,
    num_train: int,
    num_validation: int,
    evidence: EvidenceName,
) -> None:
    data = ClientData(draw("train", num_train), draw("validation", num_validation))
    expecting = TuningSettings(
        evidence=evidence,
        num_neighbors_grid=(3, 20),
        prior=(PriorPoint(num_examples=10, knn_weight=0.65),),
    )
    expecting_nothing = replace(expecting, prior=())

    def chosen(tuning: TuningSettings) -> dict[str, float]:
        settings = KnnSettings(knn_weights=(0.3, 0.7, 1.0), tuning=tuning)
        predictor = served(tiny_task, data, settings)
        return {"knn_weight": predictor.knn_weight, **predictor.tuning}

    nothing = {"num_held_out": 0, "num_left_out": 0, "num_neighbors": 10}
    assert chosen(expecting_nothing) == {"knn_weight": 0.0, **nothing}
    assert chosen(expecting) == {"knn_weight": 0.7, **nothing}


@pytest.mark.parametrize(
    ("evidence", "num_held_out", "num_left_out"),
    [("validation", 9, 0), ("leave_one_out", 0, 29), ("auto", 0, 29)],
)
def test_what_was_chosen_and_on_what_is_reported(
    tiny_task: Task,
    draw: Draw,
    evidence: EvidenceName,
    num_held_out: int,
    num_left_out: int,
) -> None:
    tuning = TuningSettings(
        evidence=evidence,
        min_validation=10,
        num_neighbors_grid=(4,),
        kernel_scale_grid=(0.5,),
    )
    data = ClientData(draw("train", 20), draw("validation", 9))
    described = {**served(tiny_task, data, KnnSettings(tuning=tuning)).describe()}

    assert described.pop("knn_weight") in KnnSettings().knn_weights
    assert described == {
        "num_stored": 29,
        "num_held_out": num_held_out,
        "num_left_out": num_left_out,
        "num_neighbors": 4,
        "kernel_scale": 0.5,
    }


def test_where_all_is_fixed_nothing_is_scored(tiny_task: Task, draw: Draw) -> None:
    tuning = TuningSettings(num_neighbors_grid=(4,), kernel_scale_grid=(0.5,))
    settings = KnnSettings(knn_weights=(0.7,), tuning=tuning)
    data = ClientData(draw("train", 20), draw("validation", 9))

    assert served(tiny_task, data, settings).describe() == {
        "knn_weight": 0.7,
        "num_stored": 29,
        "num_held_out": 0,
        "num_left_out": 0,
        "num_neighbors": 4,
        "kernel_scale": 0.5,
    }


@pytest.mark.parametrize(
    ("num_train", "num_validation", "num_held_out", "num_left_out"),
    [(20, 10, 10, 0), (20, 9, 0, 29), (0, 10, 0, 10)],
)
def test_enough_validation_examples_are_preferred(
    tiny_task: Task,
    draw: Draw,
    num_train: int,
    num_validation: int,
    num_held_out: int,
    num_left_out: int,
) -> None:
    tuning = TuningSettings(evidence="auto", min_validation=10)
    data = ClientData(draw("train", num_train), draw("validation", num_validation))
    described = served(tiny_task, data, KnnSettings(tuning=tuning)).describe()

    scored = (described["num_held_out"], described["num_left_out"])
    assert scored == (num_held_out, num_left_out)


def test_a_stored_example_is_no_evidence_for_itself(
    tiny_task: Task, draw: Draw
) -> None:
    # All images are equal and their labels differ: each is wrong about every other.
    image = draw("train", 1).images
    examples = Examples(image.repeat(NUM_CLASSES, 1, 1, 1), torch.arange(NUM_CLASSES))
    tuning = TuningSettings(evidence="leave_one_out")
    settings = KnnSettings(num_neighbors=1, knn_weights=(0.0, 1.0), tuning=tuning)
    data = ClientData(examples, draw("validation", 0))

    assert served(tiny_task, data, settings).describe()["knn_weight"] == 0.0


def test_the_chosen_combination_is_served(tiny_task: Task, draw: Draw) -> None:
    data = ClientData(draw("train", 40), draw("validation", 20))
    tuning = TuningSettings(
        criterion="log_loss",
        evidence="leave_one_out",
        num_neighbors_grid=(1, 5, 15),
        kernel_scale_grid=(0.1, 10.0),
    )
    tuned = served(tiny_task, data, KnnSettings(tuning=tuning))
    chosen = tuned.describe()
    fixed = KnnSettings(
        num_neighbors=int(chosen["num_neighbors"]),
        kernel_scale=chosen["kernel_scale"],
        knn_weights=(chosen["knn_weight"],),
    )
    images = draw("test", 30).images

    assert chosen["num_neighbors"] in tuning.num_neighbors_grid
    assert torch.equal(served(tiny_task, data, fixed)(images), tuned(images))


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
    index = INDEX_KINDS[name].settings_type()
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
    last = data.train_and_validation().take(torch.arange(28, 40))
    store = StoreSettings("fifo", capacity=12)
    weights = (1.0,)
    kept = served(tiny_task, data, KnnSettings(knn_weights=weights, store=store))

    assert kept.describe()["num_stored"] == 12.0
    alone = ClientData(last, draw("none", 0))
    expected = served(tiny_task, alone, KnnSettings(knn_weights=weights))
    assert torch.equal(kept(images), expected(images))


def test_chance_is_each_client_s_own_and_the_seed_s(
    tiny_task: Task, draw: Draw
) -> None:
    data = ClientData(draw("train", 60), draw("validation", 0))
    images = draw("test", 20).images

    def answers(client: str, seed: int) -> Tensor:
        store = StoreSettings("reservoir", capacity=15, seed=seed)
        settings = KnnSettings(knn_weights=(1.0,), store=store)
        rng = RandomKey(5).child(client)
        return memorize(tiny_task, tiny_task.initial_weights, data, settings, rng)(
            images
        )

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
        knn_per(tiny_task, NoSettings(), KnnSettings(store=store))


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
        {"tuning": {"criterion": "f1"}},
        {"tuning": {"prior": [{"num_examples": 0, "knn_weight": 0.5}]}},
        {"tuning": {"prior_strength": -1}},
    ],
)
def test_settings_out_of_range_are_refused(wrong: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(KnnSettings).validate_json(json.dumps(wrong))

    assert [error["loc"][0] for error in caught.value.errors()] == list(wrong)
