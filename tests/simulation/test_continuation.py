"""More rounds for a finished run: the bits of the longer run, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import knnper
from knnper.errors import ConfigError, FolderTakenError, RunError
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.continuation import begin_continuation
from knnper.simulation.engines import simulate
from knnper.simulation.origin import inputs_of, keep_inputs, sign
from knnper.simulation.workbench import open_workbench
from tests.simulation.knnper_process import outcome

pytestmark = pytest.mark.integration

EXPERIMENT: dict[str, Any] = {
    "name": "continued",
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 12,
        "alpha": 0.5,
        "unseen_fraction": 0.2,
    },
    "model": {"name": "tiny_cnn", "embedding_dim": 4},
    "training": {
        "participation": 0.5,
        "batch_size": 32,
        "learning_rate": 0.05,
        "schedule": {"name": "multi_step", "milestones": [2, 4], "factor": 0.5},
    },
    "method": {"name": "knn_per"},
    "run": {"seed": 3, "engine": "serial", "validate_every": 1},
}
DEVICES = {"speed_spread": 30, "available": 0.7, "period_s": 2}
BUFFERED = {"name": "buffered", "buffer_size": 3}


def made(folder: Path, num_rounds: int, **training: object) -> Path:
    training = {**EXPERIMENT["training"], "num_rounds": num_rounds, **training}
    document = {**EXPERIMENT, "training": training}
    experiment = load_experiment(document, experiment_catalogue())
    run = RunFolder.create(folder, experiment)
    sign(run.path)
    keep_inputs(run.path, inputs_of(experiment))
    simulate(open_workbench(experiment), run, Observer(), ["test"])
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({}, id="plain"),
        # Clients still train with earlier models when the run ends.
        pytest.param({"devices": DEVICES, "timing": BUFFERED}, id="buffered"),
        pytest.param(
            {
                "devices": DEVICES,
                "timing": {"name": "synchronous", "over_selection": 1.5},
                "selection": {"name": "utility"},
                "compression": {"name": "top_k", "fraction": 0.2},
            },
            id="selected by utility",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_continued_run_equals_the_longer_one_and_leaves_the_first(
    training: dict[str, Any], tmp_path: Path
) -> None:
    first = made(tmp_path / "first", 3, **training)
    longer = made(tmp_path / "longer", 6, **training)
    before = files_of(first)
    changes = ("training.num_rounds=6", "run.checkpoint_every=2")
    bench, folder = begin_continuation(first, changes, tmp_path / "more")
    simulate(bench, folder, Observer(), ["test"])
    assert outcome(folder.path) == outcome(longer)
    assert rounds_of(folder.path) == rounds_of(longer)
    assert files_of(first) == before
    assert bench.experiment.training.num_rounds == 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("continued") / "first", 2)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ("training.learning_rate=0.1", "training.learning_rate"),
        ("training.schedule={name: constant}", "training.schedule."),
        ("partition.alpha=0.3", "partition.alpha"),
        ("model.embedding_dim=8", "model.embedding_dim"),
        ("model.memory_format=contiguous", "model.memory_format"),
        ("method={name: fedprox}", "method.name"),
        ("run.seed=4", "run.seed"),
        ("personalization.num_neighbors=5", "personalization.num_neighbors"),
        ("run.metrics=[macro_f1]", "run.metrics"),
    ],
)
def test_every_other_change_of_results_is_refused_by_name(
    finished: Path, change: str, place: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        begin_continuation(
            finished, (change, "training.num_rounds=3"), tmp_path / "more"
        )
    assert any(problem.place.startswith(place) for problem in caught.value.problems)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("num_rounds", ["1", "2"])
def test_fewer_or_as_many_rounds_are_refused(
    finished: Path, num_rounds: str, tmp_path: Path
) -> None:
    message = r"num_rounds: found \d, expected more than the 2 rounds"
    with pytest.raises(ConfigError, match=message):
        begin_continuation(
            finished, (f"training.num_rounds={num_rounds}",), tmp_path / "more"
        )
    with pytest.raises(ConfigError, match=r"found 2, expected more.*num_rounds=4"):
        begin_continuation(finished, (), tmp_path / "more")


def test_folders_that_cannot_be_continued_are_refused(
    finished: Path, tmp_path: Path
) -> None:
    longer = ("training.num_rounds=3",)
    with pytest.raises(RunError, match="holds no run"):
        begin_continuation(tmp_path, longer, tmp_path / "more")
    with pytest.raises(RunError, match="finished run's own folder; give a new one"):
        begin_continuation(finished, longer, finished, overwrite=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(FolderTakenError, match="choose another folder"):
        begin_continuation(finished, longer, tmp_path / "taken", overwrite=True)
    copied = made(tmp_path / "copied", 2)
    checkpoints = copied / "checkpoints"
    checkpoints.rename(tmp_path / "checkpoints")
    with pytest.raises(RunError, match=r"checkpoint of round 2 .* found none"):
        begin_continuation(copied, longer, tmp_path / "more")
    (copied / "results.json").unlink()
    with pytest.raises(RunError, match="is not done, expected a finished run"):
        begin_continuation(copied, longer, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_data_that_changed_is_refused(finished: Path, tmp_path: Path) -> None:
    copied = made(tmp_path / "copied", 2)
    inputs = copied / "inputs.json"
    inputs.write_text(inputs.read_text().replace('"data": "', '"data": "0'))
    with pytest.raises(RunError, match="data set is not what it was"):
        begin_continuation(copied, ("training.num_rounds=3",), tmp_path / "more")


def test_notebook_continues_a_run(finished: Path, tmp_path: Path) -> None:
    more = knnper.Run(finished).continued(3, tmp_path / "more", progress=False)
    assert more.is_finished
    assert len(rounds_of(more.path)) == 3
    assert outcome(more.path) == outcome(made(tmp_path / "longer", 3))
