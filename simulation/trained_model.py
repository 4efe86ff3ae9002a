"""The global model and the last state of a finished run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from knnper.data.examples import Dataset
from knnper.data.site_task import task_of
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.models import with_local_files
from knnper.own import Door, local_door
from knnper.server.checkpoints import Checkpoint, CheckpointFolder
from knnper.server.distribution import ModelDistribution
from knnper.server.run_folder import EXPERIMENT, RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.partition.clients import Partition
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, open_workbench, runtime_of
from knnper.strategies.catalogue import OpenDoor, without_start
from knnper.strategies.core.exported_model import (
    GlobalModel,
    StoredModel,
    global_model,
    is_model_folder,
    load_model,
    model_of_card,
    read_model,
    require_global_model,
)
from knnper.strategies.core.predictors import Predictor

MODEL = "model"  # the folder of the model in a federation's run


@dataclass(frozen=True, eq=False)
class TrainedModel(GlobalModel):
    """The global model of a simulation, with its data."""

    experiment: Experiment
    bench: Workbench

    @property
    def dataset(self) -> Dataset:
        """The central data set of the run, memory-mapped."""
        return self.bench.dataset

    @property
    def partition(self) -> Partition:
        """The partition of the run."""
        return self.bench.partition


@dataclass(frozen=True, eq=False)
class EndedRun:
    """A finished run with its last state."""

    folder: RunFolder
    experiment: Experiment
    bench: Workbench
    identity: str
    last: Checkpoint


def find_model(path: Path, door: Door | None = None) -> GlobalModel:
    """Return the model in an exported folder, or that of a finished run.

    The ``door`` opens users' code and files. Without one, a run may use the code that
    its experiment names, and a folder from elsewhere that which `local_door` admits.
    """
    opened: OpenDoor = Door if door is None else lambda _: door
    if path.is_file() and is_model_folder(path.parent):
        path = path.parent
    folder = next(filter(is_model_folder, (path, path / MODEL)), None)
    if folder is None:
        return trained_model(path, opened)
    if door is not None or folder == path or not (path / EXPERIMENT).is_file():
        return load_model(folder, door or local_door())
    stored = read_model(folder)
    experiment = RunFolder.open(path).experiment(experiment_catalogue())
    code = experiment.own_code
    chosen = stored.card.architecture(Door(None if code is None else Path(code)))
    weights = getattr(experiment.model.settings, "weights", None)
    if weights is None:
        chosen = with_local_files(chosen, local_door(), only_local=False)
    else:
        settings: Any = chosen.settings
        chosen = replace(chosen, local=replace(settings, weights=weights))
    return model_of_card(stored, chosen)


def stored_model(path: Path) -> StoredModel:
    """Return an exported model, or the model of a run that exported none.

    An exported model is read without running its code; a run's model is built with it.
    """
    for folder in (path, path / MODEL):
        if is_model_folder(folder):
            return read_model(folder)
    return trained_model(path)


def trained_model(run: Path, door: OpenDoor = Door) -> TrainedModel:
    """Return the global model of the finished run in the folder ``run``.

    ``door`` opens users' code in the folder that its experiment names.
    """
    experiment = RunFolder.open(run).experiment(experiment_catalogue(door))
    # First, since a method without rounds has no last state.
    require_global_model(experiment, f"the run in {run}")
    ended = ended_run(run, door)
    weights: Tensor = ended.last.state.weights
    return model_with(replace(ended.bench, experiment=ended.experiment), weights)


def ended_run(run: Path, door: OpenDoor = Door) -> EndedRun:
    """Return the last state of a finished run. Raises RunError if its data changed."""
    folder = RunFolder.open(run)
    experiment = folder.experiment(experiment_catalogue(door))
    folder.results()  # raises for a run that is not done
    bench = open_workbench(without_start(experiment))
    return ended_with(folder, experiment, bench)


def ended_with(folder: RunFolder, experiment: Experiment, bench: Workbench) -> EndedRun:
    """Return the last state of a finished run; reject other data or rounds.

    ``bench`` is the workbench of the run's experiment, which may have more rounds.
    """
    run, results = folder.path, folder.results()
    # A run that stopped at its budget of privacy has fewer than its experiment.
    manifest, num_rounds = results["manifest"], results["training"]["num_rounds"]
    expected, current = manifest["partition_hash"], fingerprint(bench.partition)
    if current != expected:
        raise RunError(
            f"the data is not what it was in the run in {run}: expected the split "
            f"{expected[:12]}, found {current[:12]}. Bring it back, or run again"
        )
    # The recorded identity: a later version may have more settings.
    identity: str = manifest["results_identity"]
    checkpoints = CheckpointFolder(folder.checkpoints, identity)
    last = checkpoints.load_latest(bench.method.state_type)
    if last is None or last.server_round != num_rounds:
        present = "none" if last is None else f"that of round {last.server_round}"
        raise RunError(
            f"expected the checkpoint of round {num_rounds} in "
            f"{folder.checkpoints}, found {present}; bring it back, or run again"
        )
    return EndedRun(folder, experiment, bench, identity, last)


def client_predictor(ended: EndedRun, client: str) -> Predictor:
    """Return a client's predictor, personalised from the last state as in the run.

    It takes the inputs of the run's workbench.
    """
    bench, names = ended.bench, ended.bench.roster
    predictors = list[Predictor]()
    runtime = replace(
        runtime_of(bench, ended.folder.path),
        keep=lambda served: predictors.append(served.predictor),
        # The run has evaluated the client and kept its predictions.
        metrics={},
        predictions=None,
    )
    distribution = ModelDistribution(
        bench.method, SerialFederation(runtime), bench.key, titles=names.titles()
    )
    sizes = {client: names.sizes()[client]}
    list(distribution.personalize(ended.last, sizes, names.seen(), ()))
    return predictors[0]


def model_with(bench: Workbench, weights: Tensor) -> TrainedModel:
    """Return the model of an experiment with weights w, shape (num_weights,)."""
    learned = replace(task_of(bench.dataset), spec=bench.whole.spec)
    model = global_model(bench.experiment, bench.whole, learned, weights)
    return TrainedModel(**vars(model), experiment=bench.experiment, bench=bench)
