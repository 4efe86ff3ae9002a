"""``knnper figure`` with a finished run of the digits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import knnper_cli.app
import papers.drift
from papers.__main__ import app, line_writer
from tests.simulation.finished_run import finished_run

DRIFT = ("clients=4", "steps=4", "shift_at=2")
MEMORY = ("clients=3", "alpha=[0.3]", "size=[9]", "deals=1")
PROTONN = ("clients=3", "capacity=[0.5]", "dim=[4]", "steps=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs"))


def make(kind: str, run: Path, output: Path, *options: str) -> str:
    command = ["figure", kind, *options, "--of", str(run), "--output", str(output)]
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
    picture = (output / "drift.svg").read_text()
    assert "</svg>" in picture
    assert "time step (batches received)" in picture
    header, *rows = (output / "drift.csv").read_text().splitlines()
    assert header.startswith("num_batches,accuracy_fixed,accuracy_fifo")
    assert [row.split(",")[0] for row in rows] == ["0", "1", "2", "3", "4"]
    about = json.loads((output / "drift.json").read_text())
    assert about["settings"]["seed"] == 0
    assert about["settings"]["shift_at"] == 2
    assert about["seconds"] > 0

    # What is finished is not made again, and gives the same numbers.
    before = (output / "drift.csv").read_bytes()
    monkeypatch.delattr(papers.drift, "follow_client")
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
    assert about["settings"]["steps"] == 2
    assert about["num_clients"] == 3


def test_the_figures_of_the_memory(tmp_path: Path) -> None:
    run = finished_run(tmp_path, unseen_fraction=0.34)
    printed = make("memory", run, tmp_path / "m", *MEMORY)
    for number in (1, 2, 5, 7, 8, 9):
        assert f"(Figure {number})" in printed
    names = ("capacity", "knn-weight", "neighbors", "kernel-scale", "best-weight")
    for name in (*names, "hardware"):
        header, *rows = (tmp_path / "m" / f"{name}.csv").read_text().splitlines()
        assert (
            ",knn_weight" in header if name == "best-weight" else ",accuracy" in header
        )
        assert len(rows) >= 4
        assert (tmp_path / "m" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        about = json.loads((tmp_path / "m" / f"{name}.json").read_text())
        assert about["figure"] == name
        assert about["settings"]["clients"] == 3


def test_the_memory_wants_clients_that_were_not_there(
    run: Path, tmp_path: Path
) -> None:
    command = ["figure", "memory", "--of", str(run), "--output", str(tmp_path / "m")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "run with --set partition.unseen_fraction=0.2" in result.output


def test_the_figure_of_the_models_quality(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "simulation" / "experiments" / "demo.yaml"
    options = ("epochs=[0, 0.2]", "alpha=[0.3]", "deals=1")
    printed = make("quality", demo, tmp_path / "q", *options)
    assert "neighbours alone, λ = 1 (Figures 3 and 12)" in printed
    assert "λ chosen by each client (Figure 13)" in printed
    assert len((tmp_path / "q" / "quality.csv").read_text().splitlines()) == 5


def test_another_seed_wants_another_folder(run: Path, tmp_path: Path) -> None:
    make("protonn", run, tmp_path / "p", *PROTONN)
    command = ["figure", "protonn", "--of", str(run), "--output", str(tmp_path / "p")]
    result = CliRunner().invoke(app, [*command, *PROTONN, "seed=1"])
    assert result.exit_code == 2
    assert "another settings.seed" in result.output


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    command = [
        "figure",
        "drift",
        "--of",
        str(tmp_path),
        "--output",
        str(tmp_path / "x"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "holds no run" in result.output


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "drift",
            ["steps=5", "shift_at=5"],
            "found shift_at 5 with steps 5, expected shift_at below steps",
        ),
        ("memory", ["only=[hardwar]"], "did you mean 'hardware'?"),
        ("memory", ["deal=3"], "deals"),
        ("memory", ["deals"], "expected KEY=VALUE"),
        ("memori", [], "expected one of memory"),
        ("three-approaches", [], "needs nothing"),
        ("memory", ["deals=0"], "deals: found 0, expected a number of at least 1"),
        ("protonn", ["capacity=[1.5]"], "capacity.0: found 1.5, expected"),
    ],
)
def test_options_are_checked_before_the_run_is_read(
    name: str, options: list[str], message: str
) -> None:
    command = ["figure", name, *options, "--of", "no/run", "--output", "x"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("name", ["reproduce", "figure"])
def test_the_earlier_commands_say_where_they_went(name: str) -> None:
    result = CliRunner().invoke(knnper_cli.app.app, [name, "a.yaml", "--clients", "3"])
    assert result.exit_code == 2
    assert f"python -m papers {name}" in " ".join(result.output.split())


def test_lines_tell_what_is_left() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, 7.0, 8.0, 20.0])
    on_part = line_writer(lines.append, "clients", lambda: next(times))
    for done in (2, 4, 5, 8):
        on_part(done, 8)
    # Two parts in 7 s leave four for 14 s.
    assert lines == ["4/8 clients, some 10 s left", "8/8 clients"]
