"""Whole runs of every method: left and taken up again, and on both engines.

`tests/simulation/test_parity.py` kills real processes, for some methods; here it is
every method, in this process.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment, to_yaml
from knnper.server.observer import Observer, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.continuation import begin_continuation
from knnper.simulation.engines import simulate
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.exported_model import save_model
from knnper.strategies.core.method import AS_IT_IS
from tests.simulation.knnper_process import outcome, validations
from tests.simulation.knnper_process import simulate as run_command
from tests.strategies.tiny import OF_STATISTICS, WITHOUT_BATCH_NORM

pytestmark = pytest.mark.integration

NUM_ROUNDS = 6
LEFT_AFTER = 3
# One of each kind: clients with a state, a server with one, updates side by side.
FAST = ("ditto", "fedadam", "fedattn", "krum")
WITH_ROUNDS = [name for name in METHODS if name not in {"local", *OF_STATISTICS}]


class Leaving(Observer):
    """Leaves a run in the middle, as Ctrl-C does."""

    def round_finished(self, record: RoundRecord) -> None:
        if record["server_round"] == LEFT_AFTER:
            raise KeyboardInterrupt


def experiment(method: str, on_top: str = AS_IT_IS) -> Experiment:
    # BatchNorm and a head: every method finds what it treats apart.
    norm = "none" if method in WITHOUT_BATCH_NORM else "batch"
    document: dict[str, Any] = {
        "name": "every",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 9,
            "alpha": 0.5,
            "unseen_fraction": 0.2,
            "proxy_fraction": 0.05,
        },
        "model": {"name": "tiny_cnn", "embedding_dim": 4, "norm": norm},
        "training": {
            "num_rounds": NUM_ROUNDS,
            "participation": 0.7,
            "batch_size": 64,
            "learning_rate": 0.02,
        },
        "method": {"name": method},
        "run": {"seed": 3, "engine": "serial", "checkpoint_every": 1},
    }
    if method in OF_STATISTICS:
        document["model"]["trained"] = "head"
        document["training"] |= {"num_rounds": 1, "participation": 1.0}
    if METHODS[method].personalization == AS_IT_IS:
        document["personalization"] = {"name": on_top}
    return load_experiment(document, experiment_catalogue())


def whole(chosen: Experiment, path: Path) -> tuple[str, bytes, bytes | None]:
    folder = RunFolder.create(path, chosen)
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    return outcome(path)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in FAST else pytest.mark.slow)
        for method in WITH_ROUNDS
    ],
)
def test_a_run_that_went_back_ends_the_same(tmp_path: Path, method: str) -> None:
    """Clients that have a state go back with it."""
    chosen = experiment(method)
    expected = whole(chosen, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    folder.go_back(2)
    # What is looked at on the way changes nothing.
    chosen = replace(chosen, run=replace(chosen.run, validate_every=2))
    with pytest.raises(KeyboardInterrupt):
        simulate(open_workbench(chosen), folder, Leaving(), ["test"])
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    assert outcome(folder.path) == expected
    folder.go_back(2)
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    assert outcome(folder.path) == expected
    validated = enumerate(validations(folder.path), 1)
    assert [number for number, figures in validated if figures] == [4, 6]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method == "ditto" else pytest.mark.slow)
        for method in sorted({*METHODS} - OF_STATISTICS)
    ],
)
def test_a_continued_run_ends_as_the_longer_one_unless_its_method_refuses(
    tmp_path: Path, method: str
) -> None:
    longer = experiment(method)
    shorter = replace(longer, training=replace(longer.training, num_rounds=LEFT_AFTER))
    whole(shorter, tmp_path / "short")
    changes = (f"training.num_rounds={NUM_ROUNDS}",)
    if METHODS[method].needs_num_rounds:
        with pytest.raises(ConfigError, match="cannot make more rounds than it began"):
            begin_continuation(tmp_path / "short", changes, tmp_path / "more")
        return
    bench, folder = begin_continuation(tmp_path / "short", changes, tmp_path / "more")
    simulate(bench, folder, Observer(), ["test"])
    assert outcome(folder.path) == whole(longer, tmp_path / "long")
    assert validations(folder.path) == validations(tmp_path / "long")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method == "scaffold" else pytest.mark.slow)
        for method in METHODS
        if METHODS[method].ends_with_global_model
    ],
)
def test_training_starts_from_the_model_of_any_method_that_ends_with_one(
    tmp_path: Path, method: str
) -> None:
    chosen = experiment(method)
    chosen = replace(chosen, training=replace(chosen.training, num_rounds=1))
    whole(chosen, tmp_path / "run")
    model = trained_model(tmp_path / "run")
    save_model(tmp_path / "model", model)
    settings: Any = chosen.model.settings
    started = replace(settings, weights=str(tmp_path / "model"))
    again = replace(chosen, model=replace(chosen.model, settings=started))
    assert torch.equal(open_workbench(again).task.initial_weights, model.weights)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("method", METHODS)
def test_both_engines_end_with_the_same_bits(tmp_path: Path, method: str) -> None:
    on_top = "knn" if METHODS[method].personalization == AS_IT_IS else AS_IT_IS
    chosen = experiment(method, on_top)
    chosen = replace(chosen, run=replace(chosen.run, validate_every=3))
    expected = whole(chosen, tmp_path / "serial")
    path = tmp_path / "every.yaml"
    path.write_text(to_yaml(chosen))
    for workers, carrier in (("1", "message"), ("2", "shared_memory")):
        folder = tmp_path / f"flower-{workers}"
        engine = ("--engine", "flower", "--workers", workers)
        run_command(
            path, *engine, "--set", f"run.carrier={carrier}", "--output", folder
        )
        bits = outcome(folder)
        assert bits == expected, f"{workers} workers, {carrier}: differs"
        assert validations(folder) == validations(tmp_path / "serial")
