"""What is told of a client's accuracy, and what is not."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.client.install import FEWEST, estimate, paired_gain
from knnper.client.state import Accuracy, Gain
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.prediction import KERNELS
from knnper.datastore.store import Store, empty_memory_store, memory_store
from knnper.datastore.tuning import CRITERIA, TuningSettings, candidates, score
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import GlobalModel
from knnper.strategies.core.task import evaluate
from knnper.strategies.knn_per import KnnSettings, Tuned, fill_and_tune
from tests.client.state.small_site import (
    TASK,
    drawn,
    installed,
    new_site_state,
    simulated,
    site,
    small_model,
)

MODEL = small_model()
DATA = site(30, 20, 15)


def filled(model: GlobalModel, data: SiteData) -> Store:
    both = data.client_data().train_and_validation()
    return memory_store(model.embed(both.images), both.labels, 4)


def random_labels(split: NamedExamples) -> NamedExamples:
    """Images that say nothing about their labels."""
    generator = RandomKey(3, ("labels", split.names[0])).numpy()
    labels = torch.from_numpy(generator.integers(0, 4, len(split)))
    return NamedExamples(Examples(split.examples.images, labels), split.names)


def test_the_paired_gain_of_a_known_table() -> None:
    before = torch.tensor([True] * 5 + [False] * 5)
    after = torch.tensor([True] * 4 + [False] + [True] * 3 + [False] * 2)
    found = paired_gain(before, after)

    assert found.expected == pytest.approx(0.2)  # 3 won, 1 lost, of 10
    # ((b + c + 1) - (b - c)² / (n + 2)) / (n + 2)², with b = 3, c = 1, n = 10
    variance = (5 - 4 / 12) / 144
    assert found.margin == pytest.approx(1.96 * np.sqrt(variance))
    assert found.num_examples == 10


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_the_gain_is_the_difference_of_the_accuracies(
    pairs: list[tuple[bool, bool]],
) -> None:
    before, after = (torch.tensor(column) for column in zip(*pairs, strict=True))
    found = paired_gain(before, after)
    swapped = paired_gain(after, before)
    assert found.expected == pytest.approx(
        float(after.double().mean() - before.double().mean())
    )
    assert found.margin is not None
    assert found.expected is not None
    assert found.margin > 0
    assert swapped.expected == pytest.approx(-found.expected)
    assert swapped.margin == pytest.approx(found.margin)


def test_the_neighbours_part_is_that_of_leaving_one_out() -> None:
    model, data = small_model(), site()
    store, fixed = filled(model, data), KnnSettings(knn_weights=(1.0,), num_neighbors=1)
    accuracy, _ = estimate(model, store, torch.arange(50), fixed, "leave_one_out")

    both = data.client_data().train_and_validation()
    embeddings = model.embed(both.images).double()
    distances = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf)
    right = both.labels[distances.argmin(dim=1)] == both.labels
    alone = model.head(model.embed(both.images)).argmax(dim=1) == both.labels
    expected = float(right.double().mean())
    assert accuracy == Accuracy(
        float(alone.double().mean()), expected, expected, 50, "leave_one_out"
    )


def test_only_the_examples_that_are_asked_for_are_measured() -> None:
    model, data = small_model(), site()
    positions = torch.arange(30, 50)
    store = filled(model, data)
    accuracy, _ = estimate(model, store, positions, KnnSettings(), "validation")
    assert accuracy.num_examples == 20
    labels = data.validation.examples.labels
    alone = model.head(model.embed(data.validation.examples.images)).argmax(dim=1)
    assert accuracy.global_model == float((alone == labels).double().mean())


def test_of_few_examples_nothing_is_said() -> None:
    model, data = small_model(), site()
    few = torch.arange(FEWEST - 1)
    found = estimate(model, filled(model, data), few, KnnSettings(), "leave_one_out")
    assert found == (Accuracy(), Gain(num_examples=FEWEST - 1))
    assert not found[1].is_loss


def test_the_choice_is_not_judged_by_what_it_was_made_on() -> None:
    # Labels that nothing tells: the best of many choices looks good where it was made.
    model = small_model()
    grid = KnnSettings(
        knn_weights=tuple(n / 10 for n in range(11)),
        tuning=TuningSettings(
            evidence="leave_one_out",
            num_neighbors_grid=(1, 2, 3, 5, 8),
            kernel_scale_grid=(0.1, 1.0, 10.0),
        ),
    )
    gains, fooled = [], []
    for number in range(12):
        noise = random_labels(drawn(f"noise{number}", 60)).examples
        store = empty_memory_store(StoreSpec(4), model.embedding_dim, "noise")
        new = NewExamples(model.embed(noise.images), noise.labels)
        nothing = NewExamples(new.embeddings[:0], new.labels[:0])
        tuned = fill_and_tune(store, new, nothing, model.head, grid)
        _, gain = estimate(model, store, torch.arange(60), grid, "leave_one_out")
        gains.append(gain.expected or 0.0)
        fooled.append(in_sample_gain(tuned, grid))

    assert np.mean(fooled) > 0.08
    assert np.mean(gains) < np.mean(fooled) / 2


def in_sample_gain(tuned: Tuned, settings: KnnSettings) -> float:
    """What the choice gains on the very examples that it was made on."""
    choice = tuned.choice
    tried = candidates(
        (0.0, choice.knn_weight), (choice.num_neighbors,), (choice.kernel_scale,)
    )
    kernel, criterion = KERNELS[settings.kernel], CRITERIA["accuracy"]
    scores = score(tuned.evidence, tried, kernel, criterion)[:, 0, 0]
    return float(scores[-1] - scores[0]) / len(tuned.evidence)


def test_where_the_memory_loses_the_global_model_is_served(tmp_path: Path) -> None:
    # λ is fixed to the neighbours, all of which count alike: they know the commonest
    # label only, and the global model is always right.
    model = small_model(seed=6, knn_weights=[1.0], num_neighbors=400, kernel_scale=1e6)
    images = drawn("train", 400).examples.images
    labels = model.head(model.embed(images)).argmax(dim=1)
    train = NamedExamples(Examples(images, labels), drawn("train", 400).names)
    data = SiteData(train, drawn("validation", 0), drawn("test", 0), TASK)
    serving = new_site_state(tmp_path).install(model, data, took_part=False).serving

    assert serving.knn_weight == 0.0
    assert serving.tuned_on.overruled
    assert serving.accuracy.global_model == serving.accuracy.mixed == 1.0
    assert serving.accuracy.knn is not None
    assert serving.accuracy.knn < 0.9
    assert serving.expected_gain == Gain(0.0, 0.0, 400)


@pytest.mark.parametrize(
    ("sizes", "num_measured"), [((30, 20, 0), 20), ((30, 5, 0), None)]
)
def test_who_took_part_is_measured_on_validation_only(
    tmp_path: Path, sizes: tuple[int, int, int], num_measured: int | None
) -> None:
    site_state = new_site_state(tmp_path)
    serving = site_state.install(small_model(), site(*sizes), took_part=True).serving
    assert serving.accuracy.num_examples == num_measured
    assert serving.accuracy.measured_on == ("validation" if num_measured else None)


def test_figures_are_those_of_the_simulations_client(tmp_path: Path) -> None:
    decided = new_site_state(tmp_path).install(MODEL, DATA, took_part=True)
    predictor = simulated(MODEL, DATA)
    test = DATA.test.examples
    assert decided.mixed == evaluate(predictor, test)
    alone = dataclasses.replace(predictor, knn_weight=0.0)
    assert decided.global_model == evaluate(alone, test)
    only = dataclasses.replace(predictor, knn_weight=1.0)
    assert decided.serving.accuracy.knn == evaluate(only, test).accuracy
    assert decided.chosen == predictor.describe()
    accuracy = decided.serving.accuracy
    assert (accuracy.measured_on, accuracy.num_examples) == ("test", 15)
    assert accuracy.global_model == decided.global_model.accuracy
    assert accuracy.mixed == decided.mixed.accuracy
    assert decided.serving.expected_gain.num_examples == 20
    without = new_site_state(tmp_path / "other").install(MODEL, site(), took_part=True)
    assert without.mixed.num_examples == 0
    assert without.serving.accuracy.measured_on == "validation"


def test_all_that_the_memory_holds_is_reported(tmp_path: Path) -> None:
    site_state = installed(tmp_path, MODEL, DATA)
    fewer = dataclasses.replace(DATA, train=drawn("train", 10))
    decided = site_state.install(MODEL, fewer, took_part=True)
    assert decided.chosen["num_stored"] == 50
