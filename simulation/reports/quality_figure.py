"""The figure of the global model's quality: from an experiment to a picture."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic_core import to_jsonable_python
from torch import Tensor

from knnper.data.examples import Examples
from knnper.datastore.tuning import candidates
from knnper.experiment import (
    Experiment,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Settings,
)
from knnper.loading import results_identity, to_document
from knnper.process import with_fixed_threads
from knnper.seeding import RandomKey
from knnper.server.checkpoint import CheckpointFolder
from knnper.simulation.partition.assignment import PartitionSettings
from knnper.simulation.reports.figure import (
    SOFT,
    Curve,
    FigureFolder,
    OnPart,
    PartRecord,
    QualityOptions,
    accuracy_axis,
    correlation,
    curve_over,
    curve_rows,
    identity_of_inputs,
    plot_curves,
    styled,
)
from knnper.simulation.reports.memory_figures import (
    Newcomer,
    NewcomerPool,
    Rememberer,
    count_correct,
    count_correct_with_each,
    knn_settings,
)
from knnper.simulation.reports.tables import Chart, Shown, Table, percent
from knnper.simulation.trained_model import TrainedModel, model_with
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.core.training import local_sgd, steps_per_epoch


@dataclass(frozen=True)
class QualitySettings(Settings):
    """Where training is stopped, and who the new clients are.

    Attributes
    ----------
    epochs
        Passes over the central training data after which the model is kept, parts of
        one too; 0 is the model before training.
    alphas
        α of the clients' Dirichlet draws, one line each; the paper's by default.
    num_clients
        M; null is as many as take no part in training.
    num_deals
        How often the images are dealt anew; what points vary by.
    validation_fraction
        Part of its images on which a client chooses its λ.
    knn
        k, kernel, σ, and how a client chooses.
    """

    epochs: tuple[NonNegativeFloat, ...] = QualityOptions.epochs
    alphas: tuple[PositiveFloat, ...] = QualityOptions.alpha
    num_clients: PositiveInt | None = QualityOptions.clients
    num_deals: PositiveInt = QualityOptions.deals
    validation_fraction: ProperFraction = 0.2
    knn: KnnSettings = field(default_factory=KnnSettings)


def quality_settings(
    experiment: Experiment, options: QualityOptions
) -> QualitySettings:
    """Return what is chosen, with the experiment's own settings of kNN-Per."""
    partition = experiment.partition.settings
    default = QualitySettings(
        epochs=options.epochs,
        alphas=options.alpha,
        num_clients=options.clients,
        num_deals=options.deals,
        knn=knn_settings(experiment),
    )
    if not isinstance(partition, PartitionSettings):
        return default
    return replace(default, validation_fraction=partition.validation_fraction)


def measure(
    model: TrainedModel, settings: QualitySettings, key: RandomKey
) -> PartRecord:
    """Return how new clients do with a global model.

    Parameters
    ----------
    model
        The model; clients of its run that took no part in training give the images.
    settings
        Who the new clients are.
    key
        Fixes who gets what; with the same key all models see the same clients.

    Returns
    -------
    Mapping
        ``global_accuracy``, and by α, as text, the accuracies of each deal: ``alone``
        (λ = 1) and ``mixed`` (λ chosen by each client on its own images).
    """
    pool = NewcomerPool(model)
    rememberer = Rememberer(model.head, settings.knn, settings.validation_fraction)
    num_clients = settings.num_clients or pool.num_clients
    found: dict[str, list[PartRecord]] = {}
    for alpha in settings.alphas:
        keys = [
            key.child("deal", number, f"{alpha:g}")
            for number in range(1, settings.num_deals + 1)
        ]
        deals = (pool.deal(num_clients, alpha, one) for one in keys)
        found[f"{alpha:g}"] = [_accuracies(deal, rememberer) for deal in deals]
    test = pool.test
    return {
        "num_test": len(test),
        "global_accuracy": test.num_correct() / len(test),
        "deals": found,
    }


def _accuracies(clients: Sequence[Newcomer], rememberer: Rememberer) -> PartRecord:
    knn = rememberer.knn
    alone = candidates((1.0,), (knn.num_neighbors,), (knn.kernel_scale,))
    right = {"alone": 0, "mixed": 0}
    for client in clients:
        size = len(client.known)
        right["alone"] += int(count_correct_with_each(client, size, knn, alone))
        right["mixed"] += count_correct(rememberer.predictor(client, size), client)
    num_test = sum(len(client.test) for client in clients)
    return {name: count / num_test for name, count in right.items()}


@dataclass(frozen=True, eq=False)
class CentralTraining:
    """SGD on the images of all clients that take part in training, in one place.

    Its rate does not change; batch size, momentum and augmentation are those of the
    experiment.

    Attributes
    ----------
    bench
        The experiment.
    epochs
        Passes before the model is left, ascending; stage 1 is the first of them.
    folder
        Keeps the weights of the last stages.
    key
        Fixes every random choice.
    """

    bench: Workbench
    epochs: tuple[float, ...]
    folder: Path
    key: RandomKey

    def weights_at(self, stage: int) -> Tensor:
        """Return w after a stage, shape (num_weights,); stages are asked for in order.

        Training goes on from the last stage that was reached, also by a process
        before this one.
        """
        checkpoints = CheckpointFolder(
            self.folder, results_identity(self.bench.experiment)
        )
        latest = checkpoints.load_latest(ModelState)
        reached = 0 if latest is None else latest.server_round
        weights = (
            self.bench.task.initial_weights if latest is None else latest.state.weights
        )
        for number in range(reached + 1, stage + 1):
            weights = self._trained(weights, number)
            checkpoints.save(number, ModelState(weights))
        return weights

    @cached_property
    def examples(self) -> Examples:
        """The training and validation images of the clients that are trained with."""
        parts = [one for one in self.bench.partition.clients if one.seen]
        indices = [one for part in parts for one in (part.train, part.validation)]
        dataset = self.bench.clients.dataset
        return dataset.train.examples_at(np.sort(np.concatenate(indices)))

    def _trained(self, weights: Tensor, stage: int) -> Tensor:
        """Return what a stage makes of the weights of the one before."""
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
        """Return the steps of SGD that are made until a stage is over."""
        if stage == 0:
            return 0
        size = self.bench.task.training.batch_size
        per_epoch = steps_per_epoch(len(self.examples), size)
        return round(self.epochs[stage - 1] * per_epoch)


NAME = "quality"

KINDS: Mapping[str, str] = {
    "alone": "neighbours alone, λ = 1 (Figures 3 and 12)",
    "mixed": "λ chosen by each client (Figure 13)",
}

TITLE = "kNN-Per by the quality of the global model (Figures 3, 12 and 13)"

Curves = Mapping[str, Sequence[Curve]]


def show_quality(
    experiment: Experiment, output: Path, options: QualityOptions, on_part: OnPart
) -> Shown:
    """Make the figure as `draw_quality` does; return what it shows."""
    settings = quality_settings(experiment, options)
    found = draw_quality(experiment, output, settings, on_part)
    tables = tuple(_table(KINDS[kind], lines) for kind, lines in found.items())
    return Shown(tables, (Chart(NAME, TITLE, functools.partial(_picture, found)),))


def _table(title: str, lines: Sequence[Curve]) -> Table:
    return Table(
        title,
        ("alpha / global model", *map(percent, lines[0].x)),
        tuple((line.label, *map(percent, line.mean)) for line in lines),
    )


def draw_quality(
    experiment: Experiment, output: Path, settings: QualitySettings, on_part: OnPart
) -> Curves:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes quality.csv, .png, .svg, .pdf and .json, and the weights of the last stages.

    Parameters
    ----------
    experiment
        Gives the data, the clients, the model, how it is trained, and the seed.
    output
        The folder.
    settings
        What is shown.
    on_part
        Is told of every stage that is done.

    Returns
    -------
    Mapping
        Under each of `KINDS` the curves, by the accuracy of the global model.

    Raises
    ------
    RunError
        If all clients take part in training, there are too few images for the new
        ones, or the folder holds something else.
    DataError
        If the data set cannot be loaded.
    """
    experiment = with_fixed_threads(experiment)
    bench = open_workbench(experiment)
    pool = NewcomerPool(model_with(bench, bench.task.initial_weights))
    pool.require_clients(settings.num_clients or pool.num_clients)
    identity = {
        "figure": NAME,
        "experiment": to_document(experiment),
        **identity_of_inputs(experiment),
        "settings": to_jsonable_python(settings),
    }
    with FigureFolder.open(output, identity) as folder:
        records = _records(bench, folder, settings, on_part)
        curves = {
            kind: [_curve(records, alpha, kind) for alpha in settings.alphas]
            for kind in KINDS
        }
        folder.write_csv(f"{NAME}.csv", _HEADER, _rows(curves))
        folder.write_pictures(NAME, _picture(curves))
        details = {"correlations": _correlations(curves)}
        folder.write_description(identity, records, details)
    return curves


def _records(
    bench: Workbench, folder: FigureFolder, settings: QualitySettings, on_part: OnPart
) -> list[PartRecord]:
    """Return what was measured at each stage of training, the worst model first."""
    key = RandomKey(bench.experiment.run.seed).child(NAME)
    epochs = tuple(sorted(set(settings.epochs)))
    training = CentralTraining(bench, epochs, folder.path / "weights", key)
    stages = {f"{passes:g} epochs": at for at, passes in enumerate(epochs, start=1)}

    def make(name: str) -> PartRecord:
        weights = training.weights_at(stages[name])
        found = measure(model_with(bench, weights), settings, key)
        return {"epochs": epochs[stages[name] - 1], **found}

    records = folder.finish(list(stages), make, on_part)
    return sorted(records, key=lambda record: float(record["global_accuracy"]))


def _curve(records: Sequence[PartRecord], alpha: float, kind: str) -> Curve:
    by_model = [record["deals"][f"{alpha:g}"] for record in records]
    return curve_over(
        f"{alpha:g}",
        [record["global_accuracy"] for record in records],
        [[one[kind] for one in deal] for deal in zip(*by_model, strict=True)],
        {"epochs": [record["epochs"] for record in records]},
    )


def _correlations(curves: Curves) -> Mapping[str, Mapping[str, float | None]]:
    """Return how nearly linear each line is."""
    return {
        kind: {line.label: correlation(line.x, line.mean) for line in lines}
        for kind, lines in curves.items()
    }


_HEADER = ("kind", "alpha", "global_accuracy", "accuracy", "accuracy_std", "epochs")


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
