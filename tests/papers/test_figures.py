"""A figure's folder: what was made is kept, what is not its own is left alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import knnper_cli.app
import papers.drift
from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import FolderTakenError, RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines
from knnper.loading import load_experiment
from knnper.simulation.reports.tables import Table
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import experiment_catalogue
from papers.__main__ import app, line_writer
from papers.catalogue import FIGURES, make_figure
from papers.figures import Drawing, FigureFolder, PartRecord, figure_code, identity_of
from tests.simulation.finished_run import finished_run

IDENTITY = {"figure": "f", "seed": 1}


def test_finished_parts_are_not_made_again(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> PartRecord:
        if name == "c" and len(made) < 3:
            raise KeyboardInterrupt
        made.append(name)
        return {"value": len(made)}

    names = ["a", "b", "c"]
    with (
        FigureFolder.open(tmp_path, IDENTITY, quiet) as folder,
        pytest.raises(KeyboardInterrupt),
    ):
        folder.finish(names, make)
    made.append("interrupted")
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    with FigureFolder.open(tmp_path, IDENTITY, tell) as folder:
        records = folder.finish(names, make)
    assert made == ["a", "b", "interrupted", "c"]
    assert [record["value"] for record in records] == [1, 2, 4]
    assert [record["part"] for record in records] == names
    assert told == [(2, 3), (3, 3)]


def quiet(done: int, total: int) -> None:
    assert done <= total


def opened(path: Path, identity: Mapping[str, Any] = IDENTITY) -> None:
    with FigureFolder.open(path, identity, quiet):
        pass


def test_another_figure_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(RunError, match=r"another seed, size"):
        opened(tmp_path, {"figure": "f", "seed": 2, "size": 3})


def test_other_data_are_another_figure(tmp_path: Path) -> None:
    opened(tmp_path / "new", {**IDENTITY, "dataset": "abc"})
    with pytest.raises(RunError, match=r"another dataset; .* delete the folder"):
        opened(tmp_path / "new", {**IDENTITY, "dataset": "xyz"})


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        FigureFolder.open(tmp_path, IDENTITY, quiet),
        pytest.raises(RunError, match="another process is at work"),
    ):
        opened(tmp_path)
    opened(tmp_path)


def test_a_folder_that_two_commands_began_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        JsonLines(tmp_path / "parts.jsonl").append(IDENTITY)
    with FigureFolder.open(tmp_path, IDENTITY, quiet) as folder:
        (record,) = folder.finish(["a"], lambda name: {"value": 1})
    assert (record["part"], record["value"]) == ("a", 1)


def test_parts_of_older_code_are_told(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "parts.jsonl")
    lines.append(IDENTITY)
    for part in ({"part": "a"}, {"part": "b", "code": "older"}):
        lines.append({**part, "seconds": 1.0})
    with FigureFolder.open(tmp_path, IDENTITY, quiet) as folder:
        folder.finish(["a", "b", "c"], lambda name: {})
        (told,) = folder.write([]).remarks
    assert told.startswith(f"2 of the 3 parts of the figure in {tmp_path} were made")
    assert lines.read()[-1]["code"] == figure_code()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no figure"):
        opened(tmp_path)
    with pytest.raises(RunError, match="is a file; expected a folder"):
        opened(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_is_written_is_the_same_each_time(tmp_path: Path) -> None:
    def draw() -> Figure:
        figure = Figure()
        figure.add_subplot().plot([1, 2], label="line")
        return figure

    table = Table("t", ("a",), (("1",),))
    records, about = [{"seconds": 1.25}, {"seconds": 2.5}], {"a": [1]}
    rows: list[list[object]] = [[1, None], ["x,y", 0.5]]
    drawing = Drawing("t", "T", (table,), ["a", "b"], rows, draw, records, about)
    contents = []
    for _ in range(2):
        with FigureFolder.open(tmp_path, IDENTITY, quiet) as folder:
            shown = folder.write([drawing])
        names = ("t.svg", "t.png", "t.pdf")
        contents.append([(tmp_path / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    assert contents[0][1].startswith(b"\x89PNG")
    assert contents[0][2].startswith(b"%PDF")
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,\n"x,y",0.5\n'
    expected = {"figure": "t", "seed": 1, "a": [1], "seconds": 3.8}
    assert json.loads((tmp_path / "t.json").read_text()) == expected
    assert shown.tables == (table,)
    assert [(one.name, one.title) for one in shown.charts] == [("t", "T")]


# Data that change under a figure: what is there of it is not mixed with new parts.


def experiment(method: str) -> Experiment:
    document = {
        "name": "figure",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 6, "unseen_fraction": 0.34},
        "model": {"name": "tiny_cnn", "embedding_dim": 4},
        "method": {"name": method},
        "run": {"engine": "serial"},
    }
    return load_experiment(document, experiment_catalogue())


def inverted(dataset: Dataset) -> Dataset:
    images = 255 - dataset.train.images
    return replace(dataset, train=replace(dataset.train, images=images))


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "method"), [("quality", "fedavg"), ("fedbasis-collapse", "fedbasis")]
)
def test_a_figure_that_trains_is_not_continued_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    settings = FIGURES[name].settings()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make_figure(name, experiment(method), settings, tmp_path, interrupt)
    load = DigitsSettings.load
    monkeypatch.setattr(DigitsSettings, "load", lambda one: inverted(load(one)))
    with pytest.raises(FolderTakenError, match="another dataset"):
        make_figure(name, experiment(method), settings, tmp_path, interrupt)


def test_a_figure_of_a_run_is_one_of_its_data(tmp_path: Path) -> None:
    model = trained_model(finished_run(tmp_path))
    clients = model.bench.clients
    other = replace(clients, dataset=inverted(clients.dataset))
    found, changed = (
        identity_of(one)
        for one in (model, replace(model, bench=replace(model.bench, clients=other)))
    )
    assert [name for name in found if found[name] != changed[name]] == ["dataset"]


# ``knnper figure`` with a finished run of the digits.


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
