"""A figure's folder: what was made is kept, what is not its own is left alone."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from knnper.config.errors import RunError
from simulation.figures.folder import FigureFolder, PartRecord

IDENTITY = {"figure": "f", "seed": 1}


def test_finished_parts_are_not_made_again(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> PartRecord:
        if name == "c" and len(made) < 3:
            raise KeyboardInterrupt
        made.append(name)
        return {"value": len(made)}

    names = ["a", "b", "c"]
    with pytest.raises(KeyboardInterrupt):
        FigureFolder.open(tmp_path, IDENTITY).finish([*names[:2], "c"], make, _quiet)
    made.append("interrupted")
    told: list[tuple[int, int]] = []
    folder = FigureFolder.open(tmp_path, IDENTITY)
    records = folder.finish(names, make, lambda done, total: told.append((done, total)))
    assert made == ["a", "b", "interrupted", "c"]
    assert [record["value"] for record in records] == [1, 2, 4]
    assert [record["part"] for record in records] == names
    assert told == [(2, 3), (3, 3)]


def _quiet(done: int, total: int) -> None:
    assert done <= total


def test_another_figure_is_refused(tmp_path: Path) -> None:
    FigureFolder.open(tmp_path, IDENTITY)
    with pytest.raises(RunError, match=r"a figure with another seed, size; give"):
        FigureFolder.open(tmp_path, {"figure": "f", "seed": 2, "size": 3})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no figure"):
        FigureFolder.open(tmp_path, IDENTITY)
    with pytest.raises(RunError, match="is a file; expected a folder"):
        FigureFolder.open(tmp_path / "thesis.tex", IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        figure = Figure()
        figure.add_subplot().plot([1, 2], label="line")
        FigureFolder(tmp_path).write_pictures("picture", figure)
        names = ("picture.svg", "picture.png", "picture.pdf")
        contents.append([(tmp_path / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    assert contents[0][1].startswith(b"\x89PNG")
    assert contents[0][2].startswith(b"%PDF")


def test_tables_and_documents(tmp_path: Path) -> None:
    folder = FigureFolder(tmp_path)
    folder.write_csv("t.csv", ["a", "b"], [[1, None], ["x,y", 0.5]])
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,\n"x,y",0.5\n'
    records = [{"seconds": 1.25}, {"seconds": 2.5}]
    folder.write_description({"figure": "t", "seed": 3}, records, {"a": [1]})
    expected = {"figure": "t", "seed": 3, "a": [1], "seconds": 3.8}
    assert json.loads((tmp_path / "t.json").read_text()) == expected
