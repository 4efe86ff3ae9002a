"""The global model of a finished run, for all that works after training."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import Tensor

from knnper.config.document import to_document
from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from knnper.data.dataset import Dataset
from knnper.data.examples import InputSpec
from knnper.models.base import ModelSettings
from knnper.transport.codec import fingerprint
from server.checkpoint import Checkpoint, CheckpointFolder
from simulation.catalogue import experiment_catalogue
from simulation.partition.split import Partition
from simulation.partition.split import fingerprint as partition_fingerprint
from simulation.run_folder import RunFolder
from simulation.workbench import Workbench, open_workbench
from strategies.catalogue import METHODS
from strategies.core.records import Record


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """What a run ended with; made by `trained_model`.

    Attributes
    ----------
    experiment
        The run's settings.
    bench
        What they stand for.
    weights
        w, shape (num_weights,).
    fingerprint
        SHA-256, in hexadecimal, of all that φ and the head depend on: the weights, the
        model's name and settings, how images are normalised, and the precision.
    """

    experiment: Experiment
    bench: Workbench
    weights: Tensor
    fingerprint: str

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p), of uint8 images (n, h, w, ch)."""
        return self.bench.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the model's probabilities (n, c) from its embeddings (n, p)."""
        return self.bench.task.head(self.weights, embeddings)

    @property
    def embedding_dim(self) -> int:
        """p, the size of an embedding."""
        return self.bench.task.model.module.embedding_dim

    @property
    def spec(self) -> InputSpec:
        """What the model knows about the data."""
        return self.bench.task.spec

    @property
    def dataset(self) -> Dataset:
        """The central data set of the run, memory-mapped."""
        return self.bench.clients.dataset

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each label."""
        return self.dataset.class_names

    @property
    def partition(self) -> Partition:
        """Who had which of the data in the run."""
        return self.bench.partition


@dataclass(frozen=True)
class _Identity(Record):
    """All that an embedding depends on but the image."""

    weights: Tensor
    model: dict[str, object]
    image_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    precision: str


def trained_model(run: Path) -> TrainedModel:
    """Return the global model of the finished run in the folder ``run``.

    The run's data set is needed too: it says how images are normalised.

    Parameters
    ----------
    run
        The folder of a run of a method that ends with one trained model for all
        clients: FedAvg, FedAvg+, kNN-Per, SCAFFOLD.

    Raises
    ------
    RunError
        If there is no run, it is not done, its method ends with no such model (Local
        trains one a client, FedEM several that are mixed, pFedHN a network that makes
        them), or the data is not what it was.
    CheckpointError
        If the checkpoint cannot be read.
    DataError
        If the run's data set cannot be loaded.
    """
    folder = RunFolder.open(run)
    experiment = folder.experiment(experiment_catalogue())
    manifest = folder.results()["manifest"]
    bench = open_workbench(_without_start(experiment))
    _require_global_model(bench, run)
    _require_same_split(bench.partition, manifest["partition_hash"], run)
    # As it was written: a later version may know of more settings.
    checkpoints = CheckpointFolder(folder.checkpoints, manifest["results_identity"])
    weights: Tensor = _last_checkpoint(checkpoints, folder, bench).state.weights
    return TrainedModel(
        experiment, bench, weights, fingerprint(_identity(experiment, bench, weights))
    )


def _require_global_model(bench: Workbench, run: Path) -> None:
    # A method names its unpersonalised model where it has one of any worth: Local's is
    # what its clients start from.
    method = METHODS[bench.experiment.method.name]
    held = {field.name for field in fields(bench.method.state_type)}
    if method.reference_title is None or "weights" not in held:
        raise RunError(
            f"the run in {run} trained with {method.title}, which does not end with "
            "one model for all clients; expected a run of a method that does, such as "
            "FedAvg or kNN-Per"
        )


def _without_start(experiment: Experiment) -> Experiment:
    """Return the experiment less the file of initial weights, which may be gone."""
    settings = experiment.model.settings
    if not isinstance(settings, ModelSettings):
        raise TypeError(f"expected ModelSettings, found {type(settings).__name__}")
    choice = replace(experiment.model, settings=replace(settings, weights=None))
    return replace(experiment, model=choice)


def _require_same_split(partition: Partition, expected: str, run: Path) -> None:
    found = partition_fingerprint(partition)
    if found != expected:
        raise RunError(
            f"the data is not what it was in the run in {run}: expected the split "
            f"{expected[:12]}, found {found[:12]}. Bring it back, or run again"
        )


def _last_checkpoint(
    checkpoints: CheckpointFolder, folder: RunFolder, bench: Workbench
) -> Checkpoint:
    latest = checkpoints.load_latest(bench.method.state_type)
    if latest is None or latest.server_round != bench.method.num_rounds:
        found = "none" if latest is None else f"that of round {latest.server_round}"
        raise RunError(
            f"expected the checkpoint of round {bench.method.num_rounds} in "
            f"{folder.checkpoints}, found {found}; bring it back, or run again"
        )
    return latest


def _identity(experiment: Experiment, bench: Workbench, weights: Tensor) -> _Identity:
    model = to_document(experiment)["model"]
    spec = bench.task.spec
    return _Identity(
        weights=weights,
        model={name: model[name] for name in model if name != "weights"},
        image_shape=spec.image_shape,
        num_classes=spec.num_classes,
        mean=spec.mean,
        std=spec.std,
        precision=experiment.training.precision,
    )
