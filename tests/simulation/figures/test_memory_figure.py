"""The figures of the memory with a finished run of the digits."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.simulation.reports.figure import MemoryOptions
from knnper.simulation.reports.memory_figures import (
    MemorySettings,
    draw_memory,
    memory_settings,
)
from knnper.simulation.trained_model import TrainedModel, trained_model
from tests.simulation.finished_run import finished_run

ENDINGS = ("csv", "png", "svg", "pdf", "json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    run = finished_run(tmp_path_factory.mktemp("runs"), unseen_fraction=0.34)
    return trained_model(run)


@pytest.fixture(scope="module")
def settings(model: TrainedModel) -> MemorySettings:
    return replace(
        memory_settings(
            model, MemoryOptions(clients=3, alpha=(0.1, 1.0), size=(2, 20), deals=2)
        ),
        capacities=(0.0, 0.5, 1.0),
        knn_weights=(0.0, 0.5, 1.0),
        num_neighbors=(1, 10),
        kernel_scales=(1.0,),
        imbalances=(0.0, 0.5),
    )


def quiet(done: int, total: int) -> None:
    assert done <= total


def test_settings_follow_the_run(model: TrainedModel) -> None:
    found = memory_settings(model, MemoryOptions())
    assert found.num_clients == 2
    assert found.alpha == 0.3
    assert found.alphas == (0.1, 0.3, 0.5, 0.7, 1.0)
    assert found.validation_fraction == 0.2
    assert found.sizes[-1] > 100


def test_a_resumed_figure_is_that_of_an_uninterrupted_one(
    model: TrainedModel, settings: MemorySettings, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 6
        if done == 3:
            raise KeyboardInterrupt

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    names = ("capacity", "best-weight")
    curves = draw_memory(model, whole, settings, 1, names, quiet)
    with pytest.raises(KeyboardInterrupt):
        draw_memory(model, resumed, settings, 1, names, interrupt)
    assert draw_memory(model, resumed, settings, 1, names, quiet) == curves
    assert len((resumed / "parts.jsonl").read_text().splitlines()) == 7
    for name in names:
        for ending in ENDINGS[:-1]:
            file = f"{name}.{ending}"
            assert (whole / file).read_bytes() == (resumed / file).read_bytes(), file
        assert (resumed / f"{name}.json").is_file()
    with (whole / "capacity.csv").open() as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    assert [(row["alpha"], row["capacity"]) for row in rows] == [
        (alpha, capacity)
        for alpha in ("0.1", "1")
        for capacity in ("0.0", "0.5", "1.0")
    ]
    assert rows[0]["accuracy"] == rows[3]["accuracy"]
    assert float(rows[0]["accuracy_std"]) == 0


def test_figures_that_share_a_folder_share_their_deals(
    model: TrainedModel, settings: MemorySettings, tmp_path: Path
) -> None:
    one = draw_memory(model, tmp_path, settings, 1, ["hardware"], quiet)
    assert not (tmp_path / "neighbors.csv").exists()
    other = draw_memory(model, tmp_path, settings, 1, ["neighbors"], quiet)
    strong = next(curve for curve in one["hardware"].curves if curve.label == "strong")
    # A strong client with ΔC = 0.5 has all its images, and k is 10.
    assert strong.mean[-1] == other["neighbors"].curves[0].mean[-1]


def test_an_unknown_figure_is_named(
    model: TrainedModel, settings: MemorySettings, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"no figure 'capacities' .* mean 'capacity'\?"):
        draw_memory(model, tmp_path, settings, 1, ["capacities"], quiet)
    assert not list(tmp_path.iterdir())
