"""A figure's folder: what was made is kept, what is not its own is left alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from knnper.errors import RunError
from knnper.files import JsonLines
from knnper.simulation.reports.tables import Table
from papers.figures import Drawing, FigureFolder, PartRecord, figure_code

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
