"""The figure of the global model's quality: from an experiment to a picture."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic_core import to_jsonable_python

from knnper.config.document import to_document
from knnper.config.sections import Experiment
from knnper.config.seeding import RandomKey
from knnper.machine import with_fixed_threads
from simulation.figures.curves import (
    Curve,
    correlation,
    curve_over,
    curve_rows,
    plot_curves,
)
from simulation.figures.folder import (
    FigureFolder,
    OnPart,
    PartRecord,
    identity_of_inputs,
)
from simulation.figures.newcomers import NewcomerPool
from simulation.figures.options import QualityOptions
from simulation.figures.palette import SOFT
from simulation.figures.quality.measuring import measure
from simulation.figures.quality.settings import QualitySettings, quality_settings
from simulation.figures.quality.training import CentralTraining
from simulation.figures.style import accuracy_axis, styled
from simulation.showing import Chart, Shown, Table, percent
from simulation.trained_model import model_with
from simulation.workbench import Workbench, open_workbench

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
