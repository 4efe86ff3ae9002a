"""kNN-Per by the quality of the global model: Marfoq et al. 2022, Figures 3, 12, 13.

The model is trained centrally. At several stages of its training, the same new clients
add their memories to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic import Field
from torch import Tensor

from knnper import (
    Examples,
    Experiment,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    RandomKey,
    Settings,
)
from knnper.experiment_file import results_identity
from knnper.server.checkpoints import CheckpointFolder
from knnper.simulation.reports.figure import SOFT, accuracy_axis, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import percent
from knnper.simulation.trained_model import TrainedModel, model_with
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies import ModelState, local_sgd
from knnper.strategies.core.training import steps_per_epoch
from papers.curves import FigureCurve, correlation, curve_over, curve_rows, plot_curves
from papers.figures import Drawing, FigureFolder, PartRecord
from papers.memory import MemorySettings, Population
from papers.new_clients import NewClientService, UnseenImages

_SOME = Field(min_length=1)
_EPOCHS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
KINDS: Mapping[str, str] = {
    "alone": "neighbours alone, λ = 1 (Figures 3 and 12)",
    "mixed": "λ chosen by each client (Figure 13)",
}
Curves = Mapping[str, Sequence[FigureCurve]]


@dataclass(frozen=True)
class QualitySettings(Settings):
    """Settings of the stages of training and of the new clients.

    Attributes
    ----------
    epochs
        Stages: numbers of passes over the central data; 0 is the untrained model.
    clients
        M, the number of new clients; null is the number of unseen clients.
    alpha
        α of each line.
    partitions
        Number of partitions; points show mean and deviation over them.
    """

    epochs: Annotated[tuple[NonNegativeFloat, ...], _SOME] = _EPOCHS
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], _SOME] = (0.1, 0.3, 1.0)
    partitions: PositiveInt = 3


def measure(
    model: TrainedModel, settings: QualitySettings, key: RandomKey
) -> PartRecord:
    """Measure new clients with a global model."""
    images = UnseenImages(model)
    service = NewClientService.of(model)
    num_clients = settings.clients or images.num_clients

    def accuracies(alpha: float, number: int) -> Mapping[str, float]:
        drawn = key.child("deal", number, f"{alpha:g}")
        clients = images.partition(num_clients, alpha, drawn)
        population = Population(clients, service, MemorySettings())
        return {
            "alone": float(population.accuracies(knn_weights=(1.0,))),
            "mixed": population.at_capacity(1.0)["accuracy"],
        }

    times = range(1, settings.partitions + 1)
    return {
        "num_test": len(images.test),
        "global_accuracy": images.test.num_correct() / len(images.test),
        "partitions": {
            f"{alpha:g}": [accuracies(alpha, number) for number in times]
            for alpha in settings.alpha
        },
    }


@dataclass(frozen=True, eq=False)
class CentralTraining:
    """Central SGD on the images of all training clients.

    Stage s, from 1, ends after ``epochs[s - 1]`` passes. The learning rate is constant.
    """

    bench: Workbench
    epochs: tuple[float, ...]
    folder: Path
    key: RandomKey

    def weights_at(self, stage: int) -> Tensor:
        """Return w after a stage, shape (num_weights,); call stages in order.

        Training continues from the last reached stage, also of an earlier process.
        """
        identity = results_identity(self.bench.experiment)
        checkpoints = CheckpointFolder(self.folder, identity)
        reached, weights = 0, self.bench.task.initial_weights
        if (latest := checkpoints.load_latest(ModelState)) is not None:
            reached, weights = latest.server_round, latest.state.weights
        for number in range(reached + 1, stage + 1):
            weights = self._trained(weights, number)
            checkpoints.save(number, ModelState(weights))
        return weights

    @cached_property
    def examples(self) -> Examples:
        """Training and validation images of the training clients."""
        parts = [client for client in self.bench.partition.clients if client.seen]
        indices = [split for part in parts for split in (part.train, part.validation)]
        dataset = self.bench.clients.dataset
        return dataset.train.examples_at(np.sort(np.concatenate(indices)))

    def _trained(self, weights: Tensor, stage: int) -> Tensor:
        """Train one stage from the weights of the previous stage."""
        steps = self._num_steps(stage) - self._num_steps(stage - 1)
        if steps == 0:
            return weights
        task = self.bench.task
        training = replace(task.training, local_epochs=None, local_steps=steps)
        return local_sgd(
            replace(task, training=training),
            weights,
            self.examples,
            training.learning_rate,
            self.key.child("stage", stage),
        ).weights

    def _num_steps(self, stage: int) -> int:
        """Return the number of SGD steps until the end of a stage."""
        if stage == 0:
            return 0
        size = self.bench.task.training.batch_size
        per_epoch = steps_per_epoch(len(self.examples), size)
        return round(self.epochs[stage - 1] * per_epoch)


def draw_quality(
    experiment: Experiment, settings: QualitySettings, folder: FigureFolder
) -> list[Drawing]:
    """Draw the figure; the folder ``weights`` keeps the weights of the last stages."""
    bench = open_workbench(experiment)
    images = UnseenImages(model_with(bench, bench.task.initial_weights))
    images.require_clients(settings.clients or images.num_clients)
    key = RandomKey(experiment.run.seed).child("quality")
    epochs = tuple(sorted(set(settings.epochs)))
    training = CentralTraining(bench, epochs, folder.path / "weights", key)
    stages = {f"{passes:g} epochs": at for at, passes in enumerate(epochs, start=1)}

    def make(name: str) -> PartRecord:
        weights = training.weights_at(stages[name])
        measured = measure(model_with(bench, weights), settings, key)
        return {"epochs": epochs[stages[name] - 1], **measured}

    # The worst model first.
    records = sorted(
        folder.finish(stages, make), key=lambda record: float(record["global_accuracy"])
    )
    curves = {
        kind: [_curve(records, alpha, kind) for alpha in settings.alpha]
        for kind in KINDS
    }
    nearly_linear = {
        kind: {line.label: correlation(line.x, line.mean) for line in lines}
        for kind, lines in curves.items()
    }
    return [
        Drawing(
            name="quality",
            title="kNN-Per by the quality of the global model (Figures 3, 12 and 13)",
            tables=tuple(_table(KINDS[kind], lines) for kind, lines in curves.items()),
            header=(
                "kind",
                "alpha",
                "global_accuracy",
                "accuracy",
                "accuracy_std",
                "epochs",
            ),
            rows=_rows(curves),
            figure=_picture(curves),
            records=records,
            details={"correlations": nearly_linear},
        )
    ]


def _curve(records: Sequence[PartRecord], alpha: float, kind: str) -> FigureCurve:
    by_model = [record["partitions"][f"{alpha:g}"] for record in records]
    return curve_over(
        f"{alpha:g}",
        [record["global_accuracy"] for record in records],
        [[point[kind] for point in time] for time in zip(*by_model, strict=True)],
        {"epochs": [record["epochs"] for record in records]},
    )


def _table(title: str, lines: Sequence[FigureCurve]) -> Table:
    epochs, accuracy = lines[0].details["epochs"], lines[0].x
    order = sorted(range(len(epochs)), key=epochs.__getitem__)
    named = {"global model": accuracy, **{line.label: line.mean for line in lines}}
    return Table(
        title,
        ("alpha / epochs", *(f"{epochs[at]:g}" for at in order)),
        tuple(
            (name, *(percent(values[at]) for at in order))
            for name, values in named.items()
        ),
    )


def _rows(curves: Curves) -> Iterator[tuple[object, ...]]:
    for kind, lines in curves.items():
        for row in curve_rows(lines):
            yield kind, *row


@styled
def _picture(curves: Curves) -> Figure:
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    for axes, (kind, lines) in zip(
        figure.subplots(1, 2, sharey=True), curves.items(), strict=True
    ):
        plot_curves(axes, lines)
        accuracy_axis(axes, "kNN-Per's test accuracy")
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        axes.set_xlabel("global model's test accuracy")
        axes.axline(
            (0.5, 0.5), slope=1, color=SOFT.light, linestyle=":", label="no gain"
        )
        axes.set_title(KINDS[kind], fontsize="medium")
        axes.label_outer()
    axes.legend(title=r"$\alpha$", fontsize="small")
    return figure
