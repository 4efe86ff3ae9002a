"""The folder of a batch: whose it is, and what is never written over."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from knnper.errors import FolderTakenError, RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import BATCH, Identity, batch_folder, led

SMALL = Identity("sweep", "small")


def take(folder: Path, identity: Identity = SMALL) -> None:
    with batch_folder(folder, identity):
        assert (folder / BATCH).is_file()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def filled(folder: Path, files: Iterable[str]) -> Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    return folder


@pytest.mark.parametrize(
    "files",
    [
        ["table.csv"],
        ["notes/table.md", ".lock"],
        # A project in which other runs are, a figure, and a run.
        ["runs/small/table.csv", "data.csv"],
        [".lock", "parts.jsonl"],
        [".lock", "experiment.yaml"],
    ],
)
def test_what_is_somebody_elses_is_left_as_it_is(
    tmp_path: Path, files: list[str]
) -> None:
    folder = filled(tmp_path / "mine", files)
    before = names(folder)
    message = "mine is not empty and holds no runs of a sweep; choose another folder"
    with pytest.raises(FolderTakenError, match=message):
        take(folder)
    assert names(folder) == before


@pytest.mark.parametrize(
    "files",
    [
        [],
        [".lock"],
        ["runs/0123456789abcdef/experiment.yaml", "table.csv", "report.html"],
        [".lock", "table.csv", "table.md"],
    ],
)
def test_folders_of_earlier_versions_are_taken_and_named(
    tmp_path: Path, files: list[str]
) -> None:
    folder = filled(tmp_path / "old", files)
    take(folder)
    take(folder)
    with pytest.raises(FolderTakenError, match="holds the sweep small, expected"):
        take(folder, Identity("sweep", "other"))


def test_another_kind_of_the_same_name_is_another_batch(tmp_path: Path) -> None:
    take(tmp_path / "out")
    message = (
        "out holds the sweep small, expected the comparison small; choose another "
        "folder with --output, or delete this one"
    )
    with pytest.raises(FolderTakenError, match=message):
        take(tmp_path / "out", Identity("comparison", "small"))


def test_a_damaged_name_is_said(tmp_path: Path) -> None:
    take(tmp_path / "out")
    (tmp_path / "out" / BATCH).write_text("{")
    with pytest.raises(RunError, match="is damaged, expected kind, name of the batch"):
        take(tmp_path / "out")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    filled(tmp_path, ["out"])
    with pytest.raises(FolderTakenError, match="out is a file, expected a folder"):
        take(tmp_path / "out")


def test_who_is_at_work_is_no_server(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(RunError) as caught, led(tmp_path):
        pass
    assert str(caught.value).startswith(f"another process is at work in {tmp_path}; ")
    assert "flwr" not in str(caught.value)
