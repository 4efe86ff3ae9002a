from pathlib import Path

import pytest

from knnper.server.run_folder import RunFolder
from knnper.simulation.reports.charts import draw_curves, learning_curves, report_style
from knnper.simulation.reports.figure import SERIES
from knnper.simulation.reports.runs import Setup, load_run, setups_of
from tests.simulation.reporting.made_runs import made_run


def setups(*paths: Path) -> list[Setup]:
    return setups_of(map(load_run, paths))


def test_seeds_are_averaged_over_the_rounds_that_all_have(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", seed=0, losses=[2.0, 1.0, 0.5])
    second = made_run(tmp_path / "b", seed=1, losses=[3.0, 2.0])
    (curve,) = learning_curves(setups(first, second), "train_loss")
    assert curve.rounds == (1, 2)
    assert curve.by_seed == ((2.0, 1.0), (3.0, 2.0))
    assert curve.mean == [2.5, 1.5]


def test_a_seed_without_its_file_is_left_out(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", seed=0, losses=[2.0, 1.0])
    second = made_run(tmp_path / "b", seed=1, losses=())
    (curve,) = learning_curves(setups(first, second), "train_loss")
    assert curve.by_seed == ((2.0, 1.0),)


def test_rounds_without_the_figure_are_left_out(tmp_path: Path) -> None:
    path = made_run(tmp_path / "a", losses=[2.0, float("nan"), 1.0])
    RunFolder(path).append_round({"server_round": 4, "validation_accuracy": 0.5})
    (curve,) = learning_curves(setups(path), "train_loss")
    assert (curve.rounds, curve.mean) == ((1, 3), [2.0, 1.0])
    (curve,) = learning_curves(setups(path), "validation_accuracy")
    assert (curve.rounds, curve.mean) == ((4,), [0.5])


def test_setups_that_train_alike_share_a_curve(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "a", losses=[2.0, 1.0]),
        made_run(tmp_path / "b", method="fedavg", losses=[2.0, 1.0]),
        made_run(tmp_path / "c", method="local", losses=[2.0, 0.0]),
    ]
    found = learning_curves(setups(*paths), "train_loss")
    assert [curve.labels for curve in found] == [("kNN-Per", "FedAvg"), ("Local",)]
    colors = dict(zip(("kNN-Per", "FedAvg", "Local"), SERIES, strict=False))
    picture = draw_curves(setups(*paths), colors)
    assert picture is not None
    assert "of kNN-Per, FedAvg goes from 2.000 in round 1 to 1.000" in (
        picture.alternative
    )


@pytest.mark.parametrize("losses", [[2.3, 2.2, 2.1], [0.9], [0.0, 0.0]])
def test_axes_are_whole_and_rounds_are_integers(
    tmp_path: Path, losses: list[float]
) -> None:
    path = made_run(tmp_path / "a", losses=losses)
    RunFolder(path).append_round({"server_round": 4, "validation_accuracy": 1.0})
    with report_style():
        picture = draw_curves(setups(path), {"kNN-Per": SERIES[0]})
    assert picture is not None
    picture.figure.draw_without_rendering()
    loss, accuracy = picture.figure.axes
    low, high = loss.get_ylim()
    assert low == 0.0
    assert high > max(losses)
    low, high = accuracy.get_ylim()
    assert low <= 0.0
    assert high > 1.0
    assert min(accuracy.get_yticks()) == 0.0
    assert max(accuracy.get_yticks()) == 1.0
    assert all(tick == int(tick) for tick in accuracy.get_xticks())


@pytest.mark.parametrize("figure", ["train_loss", "validation_accuracy"])
def test_no_rounds_no_curve(tmp_path: Path, figure: str) -> None:
    path = made_run(tmp_path / "a", losses=())
    assert learning_curves(setups(path), figure) == []
    assert draw_curves(setups(path), {"kNN-Per": SERIES[0]}) is None
