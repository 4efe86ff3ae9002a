"""``knnper figure`` with a finished run of the digits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simulation.figures.drift_figure
from knnper.cli.app import app
from knnper.cli.figure import line_writer
from tests.simulation.finished_run import finished_run

DRIFT = ("--clients", "4", "--steps", "4", "--shift-at", "2")
PROTONN = ("--clients", "3", "--capacity", "0.5", "--dim", "4", "--steps", "2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs"))


def make(kind: str, run: Path, output: Path, *options: str) -> str:
    command = ["figure", kind, str(run), "--output", str(output), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_drift_figure(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "figures" / "drift"
    printed = make("drift", run, output, *DRIFT)
    assert "concatenate" in printed
    assert "clients alarmed, distance_to_own_label" in printed
    assert f"Numbers and pictures are in {output}" in printed
    assert (output / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (output / "drift.svg").read_text()
    header, *rows = (output / "drift.csv").read_text().splitlines()
    assert header.startswith("num_batches,accuracy_fixed,accuracy_fifo")
    assert [row.split(",")[0] for row in rows] == ["0", "1", "2", "3", "4"]
    about = json.loads((output / "drift.json").read_text())
    assert about["seed"] == 0
    assert about["settings"]["streams"]["shift_at"] == 2
    assert about["seconds"] > 0

    # What is finished is not made again, and gives the same numbers.
    before = (output / "drift.csv").read_bytes()
    monkeypatch.delattr(simulation.figures.drift_figure, "follow_client")
    make("drift", run, output, *DRIFT)
    assert (output / "drift.csv").read_bytes() == before


def test_the_protonn_figure(run: Path, tmp_path: Path) -> None:
    printed = make("protonn", run, tmp_path / "p", *PROTONN)
    assert "all examples" in printed
    assert "global model" in printed
    header, cell, store = (tmp_path / "p" / "protonn.csv").read_text().splitlines()
    assert header.startswith("projection_dim,capacity,accuracy")
    assert cell.startswith("4,0.5,")
    assert store.startswith(",,")
    about = json.loads((tmp_path / "p" / "protonn.json").read_text())
    assert about["settings"]["training"]["num_steps"] == 2
    assert about["num_clients"] == 3


def test_another_seed_wants_another_folder(run: Path, tmp_path: Path) -> None:
    make("protonn", run, tmp_path / "p", *PROTONN)
    command = ["figure", "protonn", str(run), "--output", str(tmp_path / "p")]
    result = CliRunner().invoke(app, [*command, *PROTONN, "--seed", "1"])
    assert result.exit_code == 1
    assert "holds a figure with another seed" in result.output


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    command = ["figure", "drift", str(tmp_path), "--output", str(tmp_path / "x")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "holds no run" in result.output


def test_the_shift_comes_before_the_end(tmp_path: Path) -> None:
    command = ["figure", "drift", "run", "--output", "x", "--steps", "5"]
    result = CliRunner().invoke(app, [*command, "--shift-at", "5"])
    assert result.exit_code == 2
    assert "expected --shift-at below --steps" in result.output


def test_lines_tell_what_is_left() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, 7.0, 8.0, 20.0])
    on_part = line_writer(lines.append, lambda: next(times))
    for done in (2, 4, 5, 8):
        on_part(done, 8)
    # Two parts in 7 s leave four for 14 s.
    assert lines == ["4/8 clients, 14 s left", "8/8 clients, 0 s left"]
