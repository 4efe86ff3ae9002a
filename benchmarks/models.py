"""The model and the images of the benchmarks that embed: of a run, or untrained."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from benchmarks.workload import Workload
from knnper.data.examples import Dataset
from knnper.simulation.trained_model import trained_model
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class ModelAndData:
    """A global model and a data set that it can embed."""

    task: Task
    weights: Tensor
    dataset: Dataset

    def embed(self, images: Tensor) -> Tensor:
        """Return the representations (n, p) of images."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)


def add_run_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be given a run."""
    parser.add_argument(
        "--run",
        type=Path,
        help="folder of a finished run, whose model and images are taken",
    )


def model_and_data(run: Path | None, images: str) -> ModelAndData:
    """Return what a run has, or LEAF's CNN before any training and given images."""
    if run is not None:
        model = trained_model(run)
        return ModelAndData(model.bench.task, model.weights, model.dataset)
    workload = Workload(1, model="leaf_cnn", embedding_dim=512, images=images)
    task = workload.workbench().task
    return ModelAndData(task, task.initial_weights, workload.dataset())
