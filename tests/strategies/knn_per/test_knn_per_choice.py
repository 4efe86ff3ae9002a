"""On what a client of kNN-Per chooses λ, k and σ, and what it tells of it."""

from dataclasses import replace

import pytest
import torch

from knnper.data.examples import ClientData, Examples
from knnper.datastore.tuning import EvidenceName, PriorPoint, TuningSettings
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.task import Task
from tests.strategies.knn_per.small_task import NUM_CLASSES, Draw, oracle, served


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
