"""Families of runs that share a training, and the folder of a batch."""

import contextlib
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import knnper
import knnper.simulation.batches.family as family_runs
from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import CheckpointError, FolderTakenError, RunError
from knnper.models import build_model
from knnper.networks import TinyCnnSettings
from knnper.seeding import RandomKey
from knnper.server.distribution import DistributionError
from knnper.server.observer import Observer
from knnper.server.rounds import TooManyFailuresError
from knnper.server.run_folder import RunFolder
from knnper.settings import Choice, Settings
from knnper.simulation import origin as inputs
from knnper.simulation.batches.family import FAILED, Event, Family, is_done, why_failed
from knnper.simulation.batches.folder import (
    BATCH,
    BatchIdentity,
    batch_folder,
    locked_folder,
)
from knnper.simulation.batches.runner import Outcome, families_of, run_batch
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.batches.tables import run_rows
from knnper.simulation.engines import simulate
from knnper.simulation.origin import (
    CODE,
    INPUTS,
    Inputs,
    code_commit,
    code_fingerprint,
    code_of,
    content_digest,
    fingerprint_in,
    is_of_this_code,
    keep_inputs,
    require_inputs,
    sign,
    sign_as,
)
from knnper.simulation.partition.clients import Partition
from knnper.simulation.partition.split import make_partition
from knnper.simulation.workbench import open_workbench
from tests.simulation.batches.small_sweep import (
    BASE,
    NEIGHBORS,
    Made,
    ignore,
    read,
    rounds,
)

pytestmark = pytest.mark.integration

RATE = "training.learning_rate"
FINGERPRINT = "knnper.simulation.origin.code_fingerprint"


def family(folder: Path, neighbors: list[int], rate: float = 0.1) -> Family:
    grid = {NEIGHBORS: neighbors}
    sweep = read(folder, grid=grid, set={RATE: rate}, seeds=[1])
    (only_family,) = families_of(
        sweep.experiments, folder / "out", ["knnper"], keeps_training=True
    )
    return only_family


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def failing(*_: Any) -> None:
    raise TooManyFailuresError("round 1: a fault of yesterday's code")


def make(chosen: Family) -> None:
    family_runs.make_runs(chosen, list[Event]().append)


MakeBy = Callable[..., None]


@pytest.fixture
def make_by(monkeypatch: pytest.MonkeyPatch) -> MakeBy:
    """Return what makes a family with a fault in place of a run, or by other code."""

    def make_by(one: Family, fault: Any = None, code: str | None = None) -> None:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if code is not None:
                patch.setattr(FINGERPRINT, lambda: code)
            if fault is not None:
                patch.setattr(family_runs, "simulate", fault)
            make(one)
            assert fault is not interrupted

    return make_by


def signatures(chosen: Family) -> list[str]:
    return [fingerprint_in(folder) for folder in chosen.runs]


def test_who_takes_a_training_over_takes_its_code_over(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    make_by(family(tmp_path, [1]), code="old")
    both = family(tmp_path, [1, 5])
    make(both)
    assert rounds(made) == [0, 2]
    assert signatures(both) == ["old", "old"]


def test_other_code_is_never_forgotten(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    (old / CODE).write_text("old")
    sign(new)
    sign_as(old, new)
    assert [is_of_this_code(folder) for folder in (old, new)] == [False, True]
    sign_as(new, old)
    assert not is_of_this_code(old)
    assert not is_of_this_code(new)


def test_what_diverged_is_not_made_again(tmp_path: Path, made: Made) -> None:
    make(family(tmp_path, [1], rate=1e30))
    assert len(made) == 1
    both = family(tmp_path, [1, 5], rate=1e30)
    make(both)
    assert len(made) == 1
    reasons = {why_failed(folder) for folder in both.runs}
    (reason,) = reasons
    assert "lower training.learning_rate" in (reason or "")


def test_a_failed_distribution_leaves_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    def failing_first(bench: Any, folder: RunFolder, *others: Any) -> Any:
        made.append((folder.path, len(folder.rounds())))
        found = simulate(bench, folder, *others)
        if bench.experiment.personalization.settings.num_neighbors == 1:
            (folder.path / "results.json").unlink()
            raise DistributionError("client 0000 could not be served")
        return found

    monkeypatch.setattr(family_runs, "simulate", failing_first)
    both = family(tmp_path, [1, 5])
    make(both)
    assert rounds(made) == [0, 2]
    first, second = both.runs
    assert "could not be served" in (why_failed(first) or "")
    assert RunFolder(second).is_finished()
    # Nor is it taken for a training that diverges when it is found.
    shutil.rmtree(second)
    make(both)
    assert RunFolder(second).is_finished()
    assert (first / FAILED).is_file()


def test_what_other_code_failed_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_by: MakeBy, made: Made
) -> None:
    single = family(tmp_path, [1])
    folder = next(iter(single.runs))
    make_by(single, failing, "old")
    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINT, lambda: "old")
        assert is_done(folder)
    assert not is_done(folder)
    make(single)
    assert rounds(made) == [0]
    assert RunFolder(folder).is_finished()
    assert why_failed(folder) is None
    assert is_of_this_code(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_two_versions_failed_at_is_made_again_by_one(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    both = family(tmp_path, [1, 5], rate=1e30)
    make_by(both, interrupted, "old")
    make(both)  # goes on with what the other began, and fails
    assert signatures(both) == ["old", "old"]
    make(both)
    make(both)
    assert rounds(made) == [0, 0]
    assert all(map(is_of_this_code, both.runs))
    assert all(is_done(folder) for folder in both.runs)


def test_a_failure_that_was_deleted_in_part_does_not_return(tmp_path: Path) -> None:
    single = family(tmp_path, [1])
    folder = next(iter(single.runs))
    left = folder.with_name(f".{folder.name}.discarded")
    for path in (left, folder):
        path.mkdir(parents=True)
        (path / FAILED).write_text("a fault\n")
    make(single)
    assert RunFolder(folder).is_finished()
    assert not left.exists()


def swept(sweep: Sweep, folder: Path, *earlier: Path) -> list[Outcome]:
    return run_batch(sweep, folder, 1, ignore, earlier=earlier)


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [dict(row) for row in run_rows(outcomes)]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return read(tmp_path, seeds=[1])


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of FedAvg, which trains as kNN-Per does."""
    folder = tmp_path_factory.mktemp("earlier")
    fedavg = {"set": {"method.name": "fedavg"}, "grid": {}}
    return trained(read(folder, seeds=[1], **fedavg), folder)


@pytest.fixture
def earlier(made_once: Path, tmp_path: Path) -> Path:
    """Return that run in a folder where it may be changed."""
    return shutil.copytree(made_once, tmp_path / "earlier")


def trained(sweep: Sweep, tmp_path: Path) -> Path:
    """Return a finished run of a sweep's only experiment."""
    (experiment,) = sweep.experiments
    bench = open_workbench(experiment)
    folder = RunFolder.create(tmp_path / "earlier", experiment)
    sign(folder.path)
    simulate(bench, folder, Observer(), ["knnper", "simulate"])
    return folder.path


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_its_training_is_not_made_again(
    sweep: Sweep, earlier: Path, tmp_path: Path, made: Made
) -> None:
    expected = figures(swept(sweep, tmp_path / "anew"))
    before = content(earlier)
    made.clear()
    rows = swept(sweep, tmp_path / "out", earlier)
    assert rounds(made) == [2, 2]
    assert figures(rows) == expected
    assert content(earlier) == before
    # Where all is made the run may be gone.
    shutil.rmtree(earlier)
    assert figures(swept(sweep, tmp_path / "out", earlier)) == expected


def test_others_of_the_sweep_are_trained(
    earlier: Path, tmp_path: Path, made: Made
) -> None:
    swept(read(tmp_path, seeds=[1, 2]), tmp_path / "out", earlier)
    assert rounds(made) == [2, 2, 0, 2]


def shorten(run: Path) -> None:
    for path in run.glob("checkpoints/*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])


def other_split(run: Path) -> None:
    split = RunFolder(run).results()["manifest"]["partition_hash"]
    results = run / "results.json"
    results.write_text(results.read_text().replace(split, "0" * 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "earlier holds no run"),
        (lambda run: (run / "results.json").unlink(), "finished .* knnper .* --resume"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "round 2 in .*, found none"),
        (shorten, "none of the checkpoints in"),
        (other_split, "the data is not what it was in the run in"),
        (
            lambda run: keep_inputs(run, Inputs(data="0" * 64, weights=None)),
            "the data set is not what it was .* or leave the run away to train again",
        ),
        (
            lambda run: shutil.copytree(run, f"{run}-copy"),
            "copy have the same training",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    sweep: Sweep,
    earlier: Path,
    tmp_path: Path,
    change: Callable[[Path], object],
    message: str,
) -> None:
    change(earlier)
    runs = [earlier, *tmp_path.glob("earlier-copy")]
    with pytest.raises((RunError, CheckpointError), match=message):
        swept(sweep, tmp_path / "out", *runs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seeds": [1, 2], "set": {"training.learning_rate": 0.2}},
            r"this sweep: training.learning_rate: found 0.1, expected 0.2\. Make",
        ),
        ({"seeds": [2, 3]}, "this sweep: seeds: found 1, expected 2"),
    ],
)
def test_a_run_that_was_trained_otherwise_is_refused(
    earlier: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        swept(read(tmp_path, **changes), tmp_path / "out", earlier)
    assert not (tmp_path / "out").exists()


def test_it_takes_the_place_of_rounds_that_were_begun(
    sweep: Sweep,
    earlier: Path,
    tmp_path: Path,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = figures(swept(sweep, tmp_path / "anew"))

    def interrupted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        simulate(bench, folder, *others)
        (folder.path / "results.json").unlink()
        shutil.rmtree(max(folder.checkpoints.glob("round-*")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(family_runs, "simulate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swept(sweep, tmp_path / "out")
    made.clear()
    assert figures(swept(sweep, tmp_path / "out", earlier)) == expected
    assert rounds(made) == [2, 2]


def test_a_state_that_none_goes_on_from_is_refused(tmp_path: Path) -> None:
    """Dapper counts rounds in the state of the method that it is on top of."""
    plain: dict[str, Any] = {"method.name": "fedavg", "partition.proxy_fraction": 0.2}
    on_top = {**plain, "personalization": {"name": "dapper"}}
    earlier = trained(read(tmp_path, seeds=[1], grid={}, set=plain), tmp_path)
    dapper = read(tmp_path, seeds=[1], grid={}, set=on_top)
    message = "keeps another state than that of fedavg, which adds to it"
    with pytest.raises(RunError, match=message):
        swept(dapper, tmp_path / "out", earlier)


def test_client_states_are_taken_over(tmp_path: Path, made: Made) -> None:
    method = {"name": "ditto", "prox_weights": [0.1]}
    settings = {"method": method, "run.checkpoint_every": 1}
    ditto = read(tmp_path, seeds=[1], grid={}, set=settings)
    expected = figures(swept(ditto, tmp_path / "anew"))
    earlier = trained(ditto, tmp_path)
    made.clear()
    assert figures(swept(ditto, tmp_path / "out", earlier)) == expected
    assert rounds(made) == [2]
    shutil.rmtree(earlier / "clients")
    with pytest.raises(RunError, match="expected the states of the clients in"):
        swept(ditto, tmp_path / "again", earlier)


SMALL = BatchIdentity("sweep", "small")


def take(folder: Path, identity: BatchIdentity = SMALL) -> None:
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
    ],
)
def test_empty_folder_is_taken(tmp_path: Path, files: list[str]) -> None:
    folder = filled(tmp_path / "old", files)
    take(folder)
    take(folder)
    with pytest.raises(FolderTakenError, match="holds the sweep small, expected"):
        take(folder, BatchIdentity("sweep", "other"))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    take(tmp_path / "out")
    message = (
        "out holds the sweep small, expected the comparison small; choose another "
        "folder with --output, or delete this one"
    )
    with pytest.raises(FolderTakenError, match=message):
        take(tmp_path / "out", BatchIdentity("comparison", "small"))
    (tmp_path / "out" / BATCH).write_text("{")
    with pytest.raises(RunError, match="is damaged; delete"):
        take(tmp_path / "out")
    filled(tmp_path, ["file"])
    with pytest.raises(FolderTakenError, match="file is a file, expected a folder"):
        take(tmp_path / "file")


def test_who_is_at_work_is_no_server(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(RunError) as caught,
        locked_folder(tmp_path),
    ):
        pass
    assert str(caught.value).startswith(f"another process is at work in {tmp_path}; ")
    assert "flwr" not in str(caught.value)


MADE = Inputs("d" * 64, None, "s" * 64)


def test_runs_of_other_weights_are_refused(tmp_path: Path) -> None:
    file, spec = tmp_path / "weights.safetensors", DigitsSettings().load().spec
    choice = Choice("tiny_cnn", TinyCnnSettings(embedding_dim=4))
    model = build_model(choice, spec, RandomKey(1))
    save_file(model.named(model.read()), file)
    base = {**BASE, "model": {**BASE["model"], "weights": str(file)}}
    sweep = read(tmp_path, base=base, grid={}, seeds=[1])
    run_batch(sweep, tmp_path / "out", 1, ignore)
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file)
    with pytest.raises(RunError, match="the file of weights is not what it was"):
        run_batch(sweep, tmp_path / "out", 1, ignore)


def test_runs_of_another_split_are_refused_although_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = read(tmp_path, base=BASE, grid={NEIGHBORS: [1, 3]}, seeds=[1])
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
    assert [row.runs for row in again] == [row.runs for row in first]
    assert seeds == [2, 1]  # once a call, since both runs have the same split


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


def git(root: Path, *arguments: str) -> None:
    as_somebody = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *as_somebody, *arguments], cwd=root, check=True)


def test_code_commit_is_the_clones_own(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("one")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    read = code_commit.__wrapped__
    assert re.fullmatch("[0-9a-f]{12}", read(tmp_path))
    # A package inside of a user's repository is not at the commit of that.
    assert read(installed) == ""
    (tmp_path / "notes.txt").write_text("not tracked")
    clean = read(tmp_path)
    (tmp_path / "code.py").write_text("two")
    assert read(tmp_path) == f"{clean}-dirty"


@pytest.mark.parametrize(
    ("commit", "expected"), [("50f3a71eca7a", "commit 50f3a71eca7a"), ("", "files ")]
)
def test_run_names_commit_or_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, expected: str
) -> None:
    assert code_of(tmp_path) == "unknown"
    monkeypatch.setattr(inputs, "code_commit", lambda: commit)
    sign(tmp_path)
    named = expected if commit else f"{expected}{code_fingerprint()[:12]}"
    assert code_of(tmp_path) == named
    assert is_of_this_code(tmp_path)


def test_what_this_code_failed_at_is_not_tried_again(
    tmp_path: Path, make_by: MakeBy, made: Made
) -> None:
    single = family(tmp_path, [1])
    make_by(single, failing)
    make(single)
    assert rounds(made) == []
    shutil.rmtree(next(iter(single.runs)))
    make(single)
    assert rounds(made) == [0]


def rows(path: Path, first: str) -> None:
    """Write 60 rows of two classes, of which the first row begins with ``first``."""
    lines = [f"{place / 60},{place % 7},{place % 2}" for place in range(60)]
    path.write_text("\n".join(["a,b,kind", f"{first},0,0", *lines[1:]]) + "\n")


def on_table(folder: Path, *neighbors: int) -> Sweep:
    data = {"name": "table", "train": str(folder / "rows.csv"), "label": "kind"}
    base = {**BASE, "data": data, "model": {"name": "mlp"}}
    grid = {NEIGHBORS: list(neighbors)}
    return read(folder, base=base, grid=grid, seeds=[1])


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
    assert [row.runs for row in again] == [row.runs for row in first]


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (Inputs("e" * 64, None), r"data set .* expected dddddddddddd, found eeeeeeee"),
        (Inputs("d" * 64, "w" * 64), "file of weights .* expected none, found wwwww"),
        (Inputs("d" * 64, None, "t" * 64), r"split .* or delete .* its runs again"),
    ],
)
def test_what_differs_is_said(tmp_path: Path, now: Inputs, message: str) -> None:
    keep_inputs(tmp_path, MADE)
    with pytest.raises(RunError, match=message):
        require_inputs(tmp_path, now)
