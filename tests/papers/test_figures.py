"""Figures by the command and by their folder: what was made is kept."""

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from matplotlib.figure import Figure
from typer.testing import CliRunner

from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import FolderTakenError, RunError
from knnper.files import JsonLines
from knnper.simulation.reports.table import Table
from knnper.simulation.trained_model import trained_model
from papers.__main__ import app
from papers.catalogue import FIGURES, make_figure
from papers.figures import (
    Drawing,
    FigureFolder,
    PartRecord,
    figure_code,
    identity_of,
    over_runs,
)
from tests.papers.small_files import experiment, quiet
from tests.simulation.finished_run import finished_run

pytestmark = pytest.mark.integration

EXPERIMENTS = Path("simulation/experiments")
PROTONN = ("clients=3", "capacity=[0.5]", "dim=[4]", "steps=2")
COLLAPSE = (
    "partition.num_clients=5",
    "model.hidden_sizes=[8]",
    "training.num_rounds=2",
    "training.local_epochs=1",
    "method.num_bases=2",
    "method.combination_epochs=1",
    "method.unseen_epochs=1",
    "method.warm_start_fraction=0.5",
)
HANDFUL = ("samples=[4, 10]", "clusters=[1, 2]", "users=4", "samples_for_clusters=10")


def figure(name: str, of: Path | None, output: Path, *options: str) -> Result:
    subject = [] if of is None else ["--of", str(of)]
    command = ["figure", name, *options, *subject, "--output", str(output)]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize(
    ("name", "of", "options", "files", "expected", "maker"),
    [
        (
            "drift",
            None,
            ("clients=4", "steps=4", "shift_at=2"),
            {"drift": ("num_batches,accuracy_fixed,accuracy_fifo", 5)},
            ("concatenate", "clients alarmed, distance_to_own_label"),
            "follow_client",
        ),
        (
            "protonn",
            None,
            PROTONN,
            {"protonn": ("projection_dim,capacity,accuracy", 2)},
            ("all examples", "global model"),
            "compress_client",
        ),
        (
            "memory",
            None,
            ("clients=3", "alpha=[0.3]", "size=[9]", "partitions=1"),
            {
                "capacity": ("alpha,capacity,accuracy", 11),
                "knn-weight": ("mean_num_stored,knn_weight,accuracy", 11),
                "neighbors": ("kind,num_neighbors,accuracy", 16),
                "kernel-scale": ("kernel_scale,knn_weight,accuracy", 66),
                "best-weight": ("kind,num_stored_from,knn_weight", 0),
                "hardware": ("clients,imbalance,accuracy", 18),
            },
            [f"(Figure {number})" for number in (1, 2, 5, 7, 8, 9)],
            "Population",
        ),
        (
            "quality",
            EXPERIMENTS / "demo.yaml",
            ("epochs=[0, 0.2]", "alpha=[0.3]", "partitions=1"),
            {"quality": ("kind,alpha,global_accuracy,accuracy,accuracy_std,epochs", 4)},
            ("λ = 1 (Figures 3 and 12)", "λ chosen by each client (Figure 13)"),
            "measure",
        ),
        (
            "fedbasis-collapse",
            EXPERIMENTS / "fedbasis_digits.yaml",
            ["seeds=[0, 1]", *(word for one in COLLAPSE for word in ("--set", one))],
            {"fedbasis-collapse": ("treated,seed,round,similarity,entropy", 30)},
            ("all, with a major basis", "10/10 trainings"),
            "follow_bases",
        ),
        (
            "three-approaches",
            None,
            (*HANDFUL, "seeds=[5]", "num_starts=1", "num_rounds=2"),
            {
                "three-approaches": (
                    "seed,samples,clusters,approach,validation_loss",
                    16,
                )
            },
            ("HypCluster (4)", "4/4 points"),
            "Measurements",
        ),
    ],
)
def test_the_command_draws_and_goes_on(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    of: Path | None,
    options: Sequence[str],
    files: Mapping[str, tuple[str, int]],
    expected: Sequence[str],
    maker: str,
) -> None:
    subject = None if name == "three-approaches" else of or run
    output = tmp_path / "figures" / name
    printed = figure(name, subject, output, *options)
    assert printed.exit_code == 0, printed.output
    for told in (*expected, f"Numbers and pictures are in {output}"):
        assert told in printed.output
    for file, (header, num_rows) in files.items():
        first, *rows = (output / f"{file}.csv").read_text().splitlines()
        assert first.startswith(header)
        assert len(rows) == num_rows if num_rows else rows
        assert (output / f"{file}.png").read_bytes().startswith(b"\x89PNG")
        assert (output / f"{file}.pdf").read_bytes().startswith(b"%PDF")
        assert "</svg>" in (output / f"{file}.svg").read_text()
        about = json.loads((output / f"{file}.json").read_text())
        assert about["figure"] == file
        assert "seconds" in about
        assert options[0].split("=")[0] in str(about)
    # What is finished is not made again, and gives the same numbers.
    before = [(output / f"{file}.csv").read_bytes() for file in files]
    monkeypatch.delattr(importlib.import_module(FIGURES[name].draw.__module__), maker)
    monkeypatch.setattr("papers.figures.write_pictures", lambda *_: [])  # takes long
    again = figure(name, subject, output, *options)
    assert again.exit_code == 0, again.output
    assert [(output / f"{file}.csv").read_bytes() for file in files] == before
    seed = ("--set", "run.seed=1") if of else ("seed=1",)
    other = figure(name, subject, output, *options, *seed)
    assert other.exit_code == 2
    assert "seed" in other.output


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("drift", ["steps=5", "shift_at=5"], "expected shift_at below steps"),
        ("memory", ["only=[hardwar]"], "did you mean 'hardware'?"),
        ("memory", ["partitions"], "expected KEY=VALUE"),
        ("memori", [], "expected one of memory"),
        ("three-approaches", [], "needs nothing"),
        ("protonn", ["capacity=[1.5]"], "capacity.0: found 1.5, expected"),
    ],
)
def test_options_are_checked_first(
    tmp_path: Path, name: str, options: list[str], message: str
) -> None:
    result = figure(name, Path("no/run"), tmp_path / "x", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for name, of, message in (
        ("memory", run, "run with --set partition.unseen_fraction=0.2"),
        ("drift", tmp_path, "holds no run"),
    ):
        result = figure(name, of, tmp_path / name)
        assert result.exit_code == 1
        assert message in result.output


IDENTITY = {"figure": "f", "seed": 1}


def opened(path: Path, identity: Mapping[str, Any] = IDENTITY) -> None:
    with FigureFolder.open(path, identity, quiet):
        pass


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
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    with FigureFolder.open(tmp_path, IDENTITY, tell) as folder:
        records = folder.finish(names, make)
    assert made == ["a", "b", "interrupted", "c"]
    assert [record["value"] for record in records] == [1, 2, 4]
    assert [record["part"] for record in records] == names
    assert told == [(2, 3), (3, 3)]


def test_another_figure_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, {**IDENTITY, "dataset": "abc"})
    for other, message in (
        ({"figure": "f", "seed": 2, "size": 3, "dataset": "abc"}, "another seed, size"),
        ({**IDENTITY, "dataset": "xyz"}, "another dataset; .* delete the folder"),
    ):
        with pytest.raises(RunError, match=message):
            opened(tmp_path, other)


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        FigureFolder.open(tmp_path, IDENTITY, quiet),
        pytest.raises(RunError, match="another process is at work"),
    ):
        opened(tmp_path)
    # As they left it before there was a lock.
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
    for path, message in (
        (tmp_path, "is not empty and not a figure"),
        (tmp_path / "thesis.tex", "is a file; expected a folder"),
    ):
        with pytest.raises(RunError, match=message):
            opened(path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_is_written_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("papers.figures.code_commit", lambda: "50f3a71eca7a")

    def draw() -> Figure:
        figure = Figure()
        figure.add_subplot().plot([1, 2], label="line")
        return figure

    table = Table("t", ("a",), (("1",),))
    records, about = [{"seconds": 1.25}, {"seconds": 2.5}], {"a": [1]}
    rows: list[list[object]] = [[1, None], ["x,y", 0.5]]
    contents = []
    for _ in range(2):
        drawing = Drawing("t", "T", (table,), ["a", "b"], rows, draw(), records, about)
        with FigureFolder.open(tmp_path, IDENTITY, quiet) as folder:
            shown = folder.write([drawing])
        names = ("t.svg", "t.png", "t.pdf")
        contents.append([(tmp_path / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,\n"x,y",0.5\n'
    expected = {"figure": "t", "seed": 1, "a": [1], "seconds": 3.8}
    expected["code"] = "50f3a71eca7a"
    assert json.loads((tmp_path / "t.json").read_text()) == expected
    assert shown.tables == (table,)
    assert [(one.name, one.title) for one in shown.charts] == [("t", "T")]


def inverted(dataset: Dataset) -> Dataset:
    images = 255 - dataset.train.images
    return replace(dataset, train=replace(dataset.train, images=images))


@pytest.mark.parametrize(
    ("name", "method"), [("quality", "fedavg"), ("fedbasis-collapse", "fedbasis")]
)
def test_a_figure_that_trains_is_not_continued_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def make() -> None:
        subject = experiment(method={"name": method})
        make_figure(name, subject, FIGURES[name].settings(), tmp_path, interrupt)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make()
    load = DigitsSettings.load
    monkeypatch.setattr(DigitsSettings, "load", lambda one: inverted(load(one)))
    with pytest.raises(FolderTakenError, match="another dataset"):
        make()


def test_a_figure_of_a_run_is_one_of_its_data(run: Path) -> None:
    model = trained_model(run)
    bench = replace(model.bench, dataset=inverted(model.dataset))
    found, changed = map(identity_of, (model, replace(model, bench=bench)))
    assert [name for name in found if found[name] != changed[name]] == ["dataset"]


def test_means_over_runs_by_hand() -> None:
    rows = ("a", "2", "0.50 %", ""), ("b", "3", "1,004", "")
    one = Table("t", ("d", "m", "x", "y"), rows)
    more = Table("t", ("d", "x", "m"), (("a", "0.7 %", "2"), ("b", "1,006", "4")))
    (found,) = over_runs([[one], [more]])
    assert found.header == ("d", "m", "x")
    # Half of the interval of two values is 12.706 / 2 times their distance.
    assert found.rows == (("a", "2", "0.60 ± 1.27*"), ("b", "4 ± 6*", "1005 ± 13*"))


def test_several_runs_have_a_folder_each(run: Path, tmp_path: Path) -> None:
    output, runs = tmp_path / "out", [tmp_path / name for name in "ab"]
    for path in runs:
        shutil.copytree(run, path)
    command = ["figure", "protonn", *PROTONN, "--output", str(output), "--of"]
    made = CliRunner().invoke(app, [*command, str(runs[0]), "--of", str(runs[1])])
    assert made.exit_code == 0, made.output
    # Of equal runs the mean is what each one has.
    assert (output / "protonn.md").read_text() == (output / "a/protonn.md").read_text()
    assert (output / "b/protonn.csv").is_file()
    twice = CliRunner().invoke(app, [*command, str(runs[0]), "--of", str(runs[0])])
    assert twice.exit_code == 2
    assert "found a, a, expected different names" in " ".join(twice.output.split())
