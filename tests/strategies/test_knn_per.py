"""kNN-Per against an oracle by brute force: its ends, its store, what it chooses on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.datastore.class_prior import (
    ClassPrior,
    ClassPriorSettings,
    adapt_probabilities,
)
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.index import FactorySettings
from knnper.datastore.memory import (
    PAPER_KNN_WEIGHTS,
    EvidenceName,
    KnnSettings,
    PriorPoint,
    TuningSettings,
)
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import KernelName, KnnPredictor
from knnper.datastore.store import UNNAMED, empty_memory_store, memory_store
from knnper.datastore.tuning import (
    fill_and_tune,
    is_fixed,
    left_out_evidence,
    validation_evidence,
)
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
from knnper.strategies.knn_per import KnnMemory, knn_predictor
from tests.datastore.index_kinds import KINDS, SCALAR
from tests.strategies.tiny import tiny_cnn_task

NUM_CLASSES = 4
TASK = tiny_cnn_task(NUM_CLASSES)


def draw(purpose: str, count: int) -> Examples:
    """Draw examples; the first row of pixels tells the label."""
    generator = RandomKey(7, (purpose,)).numpy()
    images = generator.integers(0, 256, (count, 8, 8, 1), "uint8")
    labels = generator.integers(0, NUM_CLASSES, count)
    images[:, 0] = (85 * labels)[:, None, None]
    return Examples(torch.from_numpy(images), torch.from_numpy(labels))


def client(num_train: int, num_validation: int) -> ClientData:
    return ClientData(draw("train", num_train), draw("validation", num_validation))


def served(data: ClientData, settings: KnnSettings) -> KnnPredictor:
    base = ModelPredictor(TASK, TASK.initial_weights)
    return knn_predictor(base, NUM_CLASSES, data, settings, RandomKey(5))


def stored_by(weights: Tensor, data: ClientData) -> Tensor:
    """Return φ of what a client stores, (n, p), each split in a batch of its own.

    As a client embeds them: rows of another batch may have other last bits.
    """
    splits = (data.train, data.validation)
    return torch.cat([TASK.embed(weights, split.images) for split in splits])


def oracle(
    stored: Tensor, labels: Tensor, queries: Tensor, settings: KnnSettings
) -> NDArray[np.float64]:
    """p_kNN by a loop over the queries; Eq. 6 in float64."""
    keys, points = stored.double().numpy(), queries.double().numpy()
    probabilities = np.zeros((len(points), NUM_CLASSES))
    for row, query in enumerate(points):
        distances = np.sqrt(((keys - query) ** 2).sum(axis=1))
        nearest = np.argsort(distances, kind="stable")[: settings.num_neighbors]
        kept = distances[nearest]
        if settings.kernel == "squared":
            kept = kept**2 / keys.shape[1]
        weights = np.exp(-(kept - kept.min()) / settings.kernel_scale)
        np.add.at(probabilities[row], labels.numpy()[nearest], weights / weights.sum())
    return probabilities


def knn_per(task: Task, settings: KnnSettings) -> Method:
    return KnnMemory(task, FedAvg(task, NoSettings()), settings)


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
    probabilities = served(data, settings)(test.images)
    np.testing.assert_allclose(probabilities.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("num_images", [0, 33, 193])
def test_the_global_model_alone_is_fedavg_bit_for_bit(num_images: int) -> None:
    settings = KnnSettings(knn_weights=(0.0,))
    data = client(20, 5)
    payload, rng = ModelPayload(TASK.initial_weights), RandomKey(1)
    predictor = knn_per(TASK, settings).personalize(payload, None, data, rng)
    fedavg = FedAvg(TASK, NoSettings()).personalize(payload, None, data, rng)
    images = draw("test", num_images).images
    assert torch.equal(predictor(images), fedavg(images))


def test_a_client_without_data_serves_the_global_model_whatever_its_weight() -> None:
    predictor = served(client(0, 0), KnnSettings(knn_weights=(1.0,)))
    images = draw("test", 50).images
    expected = TASK.probabilities(TASK.initial_weights, images)
    assert torch.equal(predictor(images), expected)
    described = predictor.describe()
    assert (described["knn_weight"], described["num_stored"]) == (0.0, 0.0)


@pytest.mark.parametrize(("num_train", "num_validation"), [(1, 0), (0, 1)])
def test_one_example_is_the_neighbour_of_everything(
    num_train: int, num_validation: int
) -> None:
    data = client(num_train, num_validation)
    label = int(data.train_and_validation().labels[0])
    predictor = served(data, KnnSettings(knn_weights=(0.5,)))
    images = draw("test", 5).images
    alone = TASK.probabilities(TASK.initial_weights, images)
    assert predictor.describe()["num_stored"] == 1
    assert bool((predictor(images)[:, label] >= 0.5).all())
    torch.testing.assert_close(
        2 * predictor(images) - alone, torch.eye(NUM_CLASSES)[label].repeat(5, 1)
    )


def test_the_index_that_is_set_is_searched() -> None:
    data = client(300, 60)
    images = draw("test", 20).images
    exact, coarse = (
        served(data, KnnSettings(knn_weights=(1.0,), store=store))
        for store in (StoreSettings(), StoreSettings(index=SCALAR))
    )
    # 8 bits a number move the votes, but few of them to another label.
    approximate, expected = coarse(images), exact(images)
    assert not torch.equal(approximate, expected)
    assert (approximate.argmax(dim=1) == expected.argmax(dim=1)).float().mean() > 0.8


@pytest.mark.parametrize("name", KINDS)
def test_any_index_leaves_examples_out(name: str) -> None:
    index = KINDS[name]
    tuning = TuningSettings(evidence="leave_one_out")
    store = StoreSettings(index=index)
    settings = KnnSettings(num_neighbors=1, tuning=tuning, store=store)
    image = draw("train", 1).images
    examples = Examples(image.repeat(NUM_CLASSES, 1, 1, 1), torch.arange(NUM_CLASSES))
    data = ClientData(examples, draw("validation", 0))
    assert served(data, settings).describe()["knn_weight"] == 0.0


def test_policy_decides_what_is_stored() -> None:
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
        return knn_predictor(base, NUM_CLASSES, data, settings, rng)(images)

    assert torch.equal(answers("one", 0), answers("one", 0))
    assert not torch.equal(answers("one", 0), answers("two", 0))
    assert not torch.equal(answers("one", 0), answers("one", 1))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (StoreSettings("fifo"), "capacity: found none with policy = fifo"),
        (StoreSettings(budget_mb=1e-6), "budget_mb"),
        (StoreSettings(index=FactorySettings("PQ7")), "PQ7"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_training(
    store: StoreSettings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KnnMemory(TASK, FedAvg(TASK, NoSettings()), KnnSettings(store=store))


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


def test_the_memory_is_on_the_tuned_model() -> None:
    queries, both = draw("test", 20).images, DATA.train_and_validation()
    settings = KnnSettings(num_neighbors=5, knn_weights=(1.0,))
    probabilities = served_tuned(DATA, num_neighbors=5, knn_weights=(1.0,))(queries)

    def by(weights: Tensor) -> Tensor:
        stored = stored_by(weights, DATA)
        embeddings = TASK.embed(weights, queries)
        return torch.from_numpy(
            oracle(stored, both.labels, embeddings, settings)
        ).float()

    torch.testing.assert_close(probabilities, by(tuned(both)), rtol=1e-3, atol=1e-4)
    alone = served_tuned(DATA, knn_weights=(0.0,))(queries)
    torch.testing.assert_close(alone, TASK.probabilities(tuned(both), queries))
    assert not torch.allclose(probabilities, by(TASK.initial_weights), atol=1e-2)


def test_the_weight_is_tuned_with_the_training_split_only() -> None:
    # Each validation image would find itself, with its own wrong label, in the full
    # store, and all neighbours would be right.
    validation = draw("validation", 10)
    mislabelled = Examples(validation.images, (validation.labels + 1) % NUM_CLASSES)
    grid = KnnSettings(num_neighbors=1, knn_weights=(0.0, 1.0))
    data = ClientData(draw("train", 30), mislabelled)
    assert served(data, grid).describe() == {
        "knn_weight": 0.0,
        "num_stored": 40.0,
        "num_held_out": 10.0,
        "num_left_out": 0.0,
    }


@pytest.mark.parametrize(
    ("num_train", "num_validation", "evidence"),
    [(20, 0, "validation"), (0, 20, "validation"), (1, 0, "auto"), (0, 1, "auto")],
)
def test_without_evidence_the_client_does_as_expected_of_its_size(
    num_train: int, num_validation: int, evidence: EvidenceName
) -> None:
    data = client(num_train, num_validation)
    expecting = TuningSettings(
        evidence=evidence,
        num_neighbors_grid=(3, 20),
        prior=(PriorPoint(num_examples=10, knn_weight=0.65),),
    )
    expecting_nothing = replace(expecting, prior=())

    def chosen(tuning: TuningSettings) -> dict[str, float]:
        settings = KnnSettings(knn_weights=(0.3, 0.7, 1.0), tuning=tuning)
        predictor = served(data, settings)
        return {"knn_weight": predictor.knn_weight, **predictor.tuning}

    nothing = {"num_held_out": 0, "num_left_out": 0, "num_neighbors": 10}
    assert chosen(expecting_nothing) == {"knn_weight": 0.0, **nothing}
    assert chosen(expecting) == {"knn_weight": 0.7, **nothing}


@pytest.mark.parametrize(
    ("evidence", "sizes", "num_held_out", "num_left_out", "weights"),
    [
        ("validation", (20, 9), 9, 0, PAPER_KNN_WEIGHTS),
        ("leave_one_out", (20, 10), 0, 30, PAPER_KNN_WEIGHTS),
        # Enough validation examples are preferred, if there is anything to look up.
        ("auto", (20, 10), 10, 0, PAPER_KNN_WEIGHTS),
        ("auto", (20, 9), 0, 29, PAPER_KNN_WEIGHTS),
        ("auto", (0, 10), 0, 10, PAPER_KNN_WEIGHTS),
        ("auto", (20, 10), 0, 0, (0.7,)),  # where all is fixed nothing is scored
    ],
)
def test_what_was_chosen_and_on_what_is_reported(
    evidence: EvidenceName,
    sizes: tuple[int, int],
    num_held_out: int,
    num_left_out: int,
    weights: tuple[float, ...],
) -> None:
    tuning = TuningSettings(
        evidence=evidence,
        min_validation=10,
        num_neighbors_grid=(4,),
        kernel_scale_grid=(0.5,),
    )
    settings = KnnSettings(knn_weights=weights, tuning=tuning)
    described = {**served(client(*sizes), settings).describe()}
    assert described.pop("knn_weight") in weights
    assert described == {
        "num_stored": sum(sizes),
        "num_held_out": num_held_out,
        "num_left_out": num_left_out,
        "num_neighbors": 4,
        "kernel_scale": 0.5,
    }


def test_the_chosen_combination_is_served() -> None:
    data = client(40, 20)
    tuning = TuningSettings(
        criterion="log_loss",
        evidence="leave_one_out",
        num_neighbors_grid=(1, 5, 15),
        kernel_scale_grid=(0.1, 10.0),
    )
    tuned = served(data, KnnSettings(tuning=tuning))
    chosen = tuned.describe()
    fixed = KnnSettings(
        num_neighbors=int(chosen["num_neighbors"]),
        kernel_scale=chosen["kernel_scale"],
        knn_weights=(chosen["knn_weight"],),
    )
    images = draw("test", 30).images
    assert chosen["num_neighbors"] in tuning.num_neighbors_grid
    assert torch.equal(served(data, fixed)(images), tuned(images))


PRIOR = ClassPriorSettings((1.0, 10.0, 100.0))

BY_LOSS = TuningSettings("log_loss", "leave_one_out")

THREE = torch.tensor([[0.5, 0.3, 0.2]])


def of_classes(examples: Examples, *labels: int) -> Examples:
    """Return those of some classes."""
    chosen = torch.isin(examples.labels, torch.tensor(labels))
    return examples.take(chosen.nonzero()[:, 0])


def three_shares(embeddings: torch.Tensor) -> torch.Tensor:
    return THREE.expand(len(embeddings), 3)


def test_without_strengths_it_is_the_papers() -> None:
    data = client(30, 10)
    images = draw("test", 20).images
    # Shares of the classes alone change nothing.
    neutral = ClassPriorSettings((), (0.1, 0.2, 0.3, 0.4))
    paper, same = (
        served(data, KnnSettings(tuning=BY_LOSS, class_prior=prior))
        for prior in (ClassPriorSettings(), neutral)
    )
    assert torch.equal(paper(images), same(images))
    assert paper.describe() == same.describe()
    assert "class_prior" not in same.describe()


def test_what_is_served_mixes_the_adapted_model() -> None:
    data = ClientData(
        of_classes(draw("train", 60), 0, 1), of_classes(draw("validation", 20), 0, 1)
    )
    images, weights = draw("test", 20).images, TASK.initial_weights
    settings = KnnSettings(knn_weights=(0.3,), class_prior=PRIOR)
    predictor = served(data, settings)
    both = data.train_and_validation()
    counts = torch.bincount(both.labels, minlength=NUM_CLASSES)[None]
    alone = adapt_probabilities(
        TASK.probabilities(weights, images), counts, ClassPrior(PRIOR)
    )
    knn = predictor.explain(images).vote.probabilities
    assert knn is not None
    torch.testing.assert_close(predictor(images), 0.3 * knn + 0.7 * alone)
    assert predictor.describe()["class_prior"] == 1
    assert "sharpness" not in predictor.describe()  # there was but one


def test_with_a_fixed_weight_the_sharpness_is_chosen() -> None:
    # Both splits are right at 0.6 and 0.2 for each other class: surer is better.
    train, validation = (
        NewExamples(torch.zeros((count, 1)), torch.zeros(count, dtype=torch.int64))
        for count in (8, 40)
    )
    mostly = torch.tensor([[0.6, 0.2, 0.2]])
    prior = ClassPriorSettings((1000.0,), sharpness=(1.0, 2.0))
    settings = KnnSettings(knn_weights=(0.0,), class_prior=prior)
    store = empty_memory_store(StoreSpec(3), 1, UNNAMED)

    def head(embeddings: Tensor) -> Tensor:
        return mostly.expand(len(embeddings), 3)

    tuned = fill_and_tune(store, train, validation, head, settings)
    assert (tuned.kind, len(tuned.evidence)) == ("validation", 40)
    assert tuned.choice.class_prior == ClassPrior(prior, 2.0)
    described = tuned.predictor(lambda x: x, head, store, settings).describe()
    assert described["sharpness"] == 2.0
    fixed = KnnSettings(knn_weights=(0.0,))
    assert is_fixed(fixed)


@pytest.mark.parametrize("evidence", ["validation", "leave_one_out"])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (9, 2)])
def test_clients_of_few_examples_and_of_one_class_are_served(
    sizes: tuple[int, int], evidence: str
) -> None:
    train, validation = draw("train", sizes[0]), draw("validation", sizes[1])
    one_class = Examples(train.images, torch.full_like(train.labels, 2))
    settings = KnnSettings(
        tuning=TuningSettings("log_loss", evidence),  # type: ignore[arg-type]
        class_prior=PRIOR,
    )
    images = draw("test", 7).images
    predictor = served(ClientData(one_class, validation), settings)
    probabilities = predictor(images)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(7))
    if sum(sizes) == 0:
        model = TASK.probabilities(TASK.initial_weights, images)
        assert torch.equal(probabilities, model)


def test_an_example_that_is_left_out_does_not_count_for_itself() -> None:
    labels = torch.tensor([0, 0, 1])
    store = memory_store(torch.tensor([[0.0], [1.0], [2.0]]), labels, 3)
    prior = ClassPriorSettings((3.0,))
    evidence = left_out_evidence(store, torch.tensor([2, 0]), three_shares, 2, prior)
    # The third sees (2, 0, 0), the first (1, 1, 0): q = (3, 1, 1) / 5, (2, 2, 1) / 5.
    expected = torch.tensor([[1.5, 0.3, 0.2], [1.0, 0.6, 0.2]])
    expected /= expected.sum(dim=1, keepdim=True)
    probabilities = evidence.adapted(1.0).queries.probabilities
    torch.testing.assert_close(probabilities, expected)
    assert evidence.queries.labels.tolist() == [1, 0]


def test_validation_examples_do_not_count_before_they_are_stored() -> None:
    store = memory_store(torch.zeros((2, 1)), torch.tensor([0, 0]), 3)
    validation = NewExamples(torch.ones((1, 1)), torch.tensor([2]))
    prior = ClassPriorSettings((3.0,))
    evidence = validation_evidence(store, validation, three_shares, 2, prior)
    expected = torch.tensor([[1.5, 0.3, 0.2]]) / 2
    probabilities = evidence.adapted(1.0).queries.probabilities
    torch.testing.assert_close(probabilities, expected)


def test_shares_of_other_classes_are_refused_before_anything_is_trained() -> None:
    wrong = KnnSettings(class_prior=ClassPriorSettings((1.0,), (0.5, 0.5)))
    method = FedAvg(TASK, NoSettings())
    with pytest.raises(ConfigError, match="expected 4 numbers, one for each class"):
        KnnMemory(TASK, method, wrong)
