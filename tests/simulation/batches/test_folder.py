"""The folder of a batch: whose it is, and what is never written over."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import knnper
from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import FolderTakenError, RunError
from knnper.experiment import Choice, Settings
from knnper.models import TinyCnnSettings, build_model
from knnper.seeding import RandomKey
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches import folder as inputs
from knnper.simulation.batches.folder import (
    BATCH,
    INPUTS,
    Identity,
    Inputs,
    batch_folder,
    code_fingerprint,
    content_digest,
    keep_inputs,
    led,
    require_inputs,
)
from knnper.simulation.batches.plan import Sweep
from knnper.simulation.batches.runner import run_batch
from knnper.simulation.partition.split import Partition, make_partition
from tests.simulation.batches.small_sweep import BASE, NEIGHBORS, ignore, read

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
def test_what_is_somebody_elses_is_left(tmp_path: Path, files: list[str]) -> None:
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
def test_folders_of_earlier_versions_are_taken(
    tmp_path: Path, files: list[str]
) -> None:
    folder = filled(tmp_path / "old", files)
    take(folder)
    take(folder)
    with pytest.raises(FolderTakenError, match="holds the sweep small, expected"):
        take(folder, Identity("sweep", "other"))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    take(tmp_path / "out")
    message = (
        "out holds the sweep small, expected the comparison small; choose another "
        "folder with --output, or delete this one"
    )
    with pytest.raises(FolderTakenError, match=message):
        take(tmp_path / "out", Identity("comparison", "small"))
    (tmp_path / "out" / BATCH).write_text("{")
    with pytest.raises(RunError, match="is damaged; delete"):
        take(tmp_path / "out")
    filled(tmp_path, ["file"])
    with pytest.raises(FolderTakenError, match="file is a file, expected a folder"):
        take(tmp_path / "file")


def test_who_is_at_work_is_no_server(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(RunError) as caught, led(tmp_path):
        pass
    assert str(caught.value).startswith(f"another process is at work in {tmp_path}; ")
    assert "flwr" not in str(caught.value)


# Runs of other data or weights than there are now are neither shown nor built on.


MADE = Inputs("d" * 64, None, "s" * 64)


def rows(path: Path, first: str) -> None:
    """Write 60 rows of two classes, of which the first row begins with ``first``."""
    lines = [f"{place / 60},{place % 7},{place % 2}" for place in range(60)]
    path.write_text("\n".join(["a,b,kind", f"{first},0,0", *lines[1:]]) + "\n")


def on_table(folder: Path, *neighbors: int) -> Sweep:
    data = {"name": "table", "train": str(folder / "rows.csv"), "label": "kind"}
    base = {**BASE, "data": data, "model": {"name": "mlp"}}
    vary = {NEIGHBORS: list(neighbors)}
    return read(folder, base=base, vary=vary, seeds=[1])


def test_runs_of_a_file_that_was_edited_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file, folder = tmp_path / "rows.csv", tmp_path / "out"
    rows(file, "0.0")
    first = run_batch(on_table(tmp_path, 1), folder, 1, ignore)
    rows(file, "0.5")
    for neighbors in ((1,), (1, 3)):  # shown again, and taken over
        with pytest.raises(RunError, match="the data set is not what it was when the"):
            run_batch(on_table(tmp_path, *neighbors), folder, 1, ignore)
    rows(file, "0.0")
    again = run_batch(on_table(tmp_path, 1), folder, 1, ignore)
    assert [one.runs for one in again] == [one.runs for one in first]


def test_runs_of_other_weights_are_refused(tmp_path: Path) -> None:
    file, spec = tmp_path / "weights.safetensors", DigitsSettings().load().spec
    choice = Choice("tiny_cnn", TinyCnnSettings(embedding_dim=4))
    model = build_model(choice, spec, RandomKey(1))
    save_file(model.named(model.read()), file)
    base = {**BASE, "model": {**BASE["model"], "weights": str(file)}}
    sweep = read(tmp_path, base=base, vary={}, seeds=[1])
    run_batch(sweep, tmp_path / "out", 1, ignore)
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file)
    with pytest.raises(RunError, match="the file of weights is not what it was"):
        run_batch(sweep, tmp_path / "out", 1, ignore)


def test_runs_of_another_split_are_refused_although_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = read(tmp_path, base=BASE, vary={NEIGHBORS: [1, 3]}, seeds=[1])
    first = run_batch(sweep, tmp_path / "out", 1, ignore)
    seeds: list[int] = []

    def split_by(
        seed: int, dataset: Dataset, choice: Choice[Settings], _key: RandomKey
    ) -> Partition:
        seeds.append(seed)
        return make_partition(dataset, choice, RandomKey(seed))

    monkeypatch.setattr(inputs, "make_partition", functools.partial(split_by, 2))
    with pytest.raises(RunError, match="the split is not what it was when the run in"):
        run_batch(sweep, tmp_path / "out", 1, ignore)
    monkeypatch.setattr(inputs, "make_partition", functools.partial(split_by, 1))
    again = run_batch(sweep, tmp_path / "out", 1, ignore)
    assert [one.runs for one in again] == [one.runs for one in first]
    assert seeds == [2, 1]  # once a call, since both runs have the same split


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (Inputs("e" * 64, None), r"data set .* expected dddddddddddd, found eeeeeeee"),
        (Inputs("d" * 64, "w" * 64), "file of weights .* expected none, found wwwww"),
        (Inputs("d" * 64, None, "t" * 64), r"split .* or delete .* its runs anew"),
    ],
)
def test_what_differs_is_said(tmp_path: Path, now: Inputs, message: str) -> None:
    keep_inputs(tmp_path, MADE)
    with pytest.raises(RunError, match=message):
        require_inputs(tmp_path, now)


def test_equal_or_unknown_inputs_are_taken(tmp_path: Path) -> None:
    require_inputs(tmp_path, MADE)  # nobody has noted any
    keep_inputs(tmp_path, MADE)
    keep_inputs(tmp_path, Inputs("e" * 64, None))  # is known already
    require_inputs(tmp_path, MADE)
    require_inputs(tmp_path, Inputs(MADE.data, None))
    (tmp_path / INPUTS).write_text("{")
    with pytest.raises(RunError, match="is damaged; delete"):
        require_inputs(tmp_path, MADE)


@pytest.mark.parametrize("name", ["images", "labels"])
def test_the_digest_is_of_every_example(name: str) -> None:
    digits = DigitsSettings().load()

    def changed(**arrays: Any) -> str:
        return content_digest(replace(digits, test=replace(digits.test, **arrays)))

    array = np.array(getattr(digits.test, name))
    same = changed(**{name: array.copy()})
    array[-1] += 1
    assert same == content_digest(digits)
    assert changed(**{name: array}) != same


@pytest.mark.parametrize("file", ["loading.py", "server/rounds.py"])
def test_all_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / "server").mkdir()
    monkeypatch.setattr(inputs, "_ROOT", tmp_path)
    monkeypatch.setattr(knnper, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / file).write_text("one")
    before = code_fingerprint.__wrapped__()
    (tmp_path / file).write_text("two")
    assert code_fingerprint.__wrapped__() != before
