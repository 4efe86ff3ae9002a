"""The figures of the memory with a finished run of the digits."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.simulation.reports.tables import Shown
from knnper.simulation.trained_model import TrainedModel, trained_model
from papers.catalogue import make_figure
from papers.figures import OnPart
from papers.memory import MemorySettings, PanelName, Service, UnseenImages, completed
from tests.simulation.finished_run import finished_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    run = finished_run(tmp_path_factory.mktemp("runs"), unseen_fraction=0.34)
    return trained_model(run)


SETTINGS = MemorySettings(
    clients=3,
    alpha=(0.1, 1.0),
    size=(2, 20),
    deals=2,
    seed=1,
    capacities=(0.0, 0.5, 1.0),
    knn_weights=(0.0, 0.5, 1.0),
    num_neighbors=(1, 10),
    kernel_scales=(1.0,),
    imbalances=(0.0, 0.5),
)


def quiet(done: int, total: int) -> None:
    assert done <= total


def make(
    model: TrainedModel, output: Path, *only: PanelName, on_part: OnPart = quiet
) -> Shown:
    settings = replace(SETTINGS, only=only)
    return make_figure("memory", model, settings, output, on_part)


def test_settings_follow_the_run(model: TrainedModel) -> None:
    found = completed(MemorySettings(), UnseenImages(model))
    assert found.clients == 2
    assert found.size[-1] > 100
    assert Service.of(model).validation_fraction == 0.2


def test_a_resumed_figure_is_that_of_an_uninterrupted_one(
    model: TrainedModel, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 6
        if done == 3:
            raise KeyboardInterrupt

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    names: tuple[PanelName, ...] = ("capacity", "best-weight")
    shown = make(model, whole, *names)
    with pytest.raises(KeyboardInterrupt):
        make(model, resumed, *names, on_part=interrupt)
    assert make(model, resumed, *names).tables == shown.tables
    assert len((resumed / "parts.jsonl").read_text().splitlines()) == 7
    for name in names:
        for ending in ("csv", "png", "svg", "pdf"):
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


def test_figures_that_share_a_folder_share_their_clients(
    model: TrainedModel, tmp_path: Path
) -> None:
    (one,) = make(model, tmp_path, "hardware").tables
    assert not (tmp_path / "neighbors.csv").exists()
    (other,) = make(model, tmp_path, "neighbors").tables
    # A strong client with ΔC = 0.5 has all its images, and k is 10.
    assert one.rows[1][-1] == other.rows[0][-1]
