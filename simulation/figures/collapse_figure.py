"""The figure of FedBasis' collapse: from an experiment to numbers and a picture."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.config.document import to_document
from knnper.config.errors import RunError
from knnper.config.sections import Choice, Experiment
from knnper.machine import with_fixed_threads
from simulation.figures.collapse import VARIANTS, follow_bases, settings_of
from simulation.figures.folder import (
    FigureFolder,
    OnPart,
    PartRecord,
    identity_of_inputs,
)
from simulation.figures.options import CollapseOptions
from simulation.figures.palette import INK, SERIES
from simulation.figures.style import styled
from simulation.showing import Chart, Shown, Table, percent
from simulation.workbench import open_workbench
from strategies.fedbasis import FedBasisSettings

NAME = "fedbasis-collapse"
TITLE = "What keeps FedBasis' bases apart (Figure 2)"
_LINES = (
    (INK, ":"),
    (SERIES[0], ":"),
    (SERIES[0], "-"),
    (SERIES[1], ":"),
    (SERIES[1], "-"),
)


def show_collapse(
    experiment: Experiment,
    output: Path,
    _: CollapseOptions,
    on_part: OnPart,
) -> Shown:
    """Make the figure as `draw_collapse` does; return what it shows."""
    found = draw_collapse(experiment, output, on_part)
    header = ("treated", "similarity", "entropy", "accuracy", "unseen")
    rows = tuple((variant, *_cells(record)) for variant, record in found.items())
    chart = Chart(NAME, TITLE, functools.partial(_picture, found))
    return Shown((Table(TITLE, header, rows),), (chart,))


def _cells(record: PartRecord) -> Iterator[str]:
    yield from (f"{record[name][-1]:.3f}" for name in ("similarity", "entropy"))
    for name in ("accuracy", "unseen_accuracy"):
        yield "" if record[name] is None else percent(record[name])


def draw_collapse(
    experiment: Experiment, output: Path, on_part: OnPart
) -> Mapping[str, PartRecord]:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes fedbasis-collapse.csv, .png, .svg, .pdf and .json.

    Parameters
    ----------
    experiment
        One of FedBasis; each variant changes its method's settings alone.
    output
        The folder.
    on_part
        Is told of every variant that is done.

    Returns
    -------
    Mapping
        `simulation.figures.collapse.BasesFollowed.as_record` of each variant.

    Raises
    ------
    RunError
        If the experiment has another method or one basis, or the folder holds
        something else.
    DataError
        If its data set cannot be loaded.
    """
    experiment = with_fixed_threads(experiment)
    settings = _settings(experiment)
    name = experiment.method.name
    identity = {
        "figure": NAME,
        "experiment": to_document(experiment),
        **identity_of_inputs(experiment),
    }

    def follow(variant: str) -> PartRecord:
        method = Choice(name, VARIANTS[variant](settings))
        bench = open_workbench(replace(experiment, method=method))
        return follow_bases(bench).as_record()

    with FigureFolder.open(output, identity) as folder:
        records = folder.finish(list(VARIANTS), follow, on_part)
        found = dict(zip(VARIANTS, records, strict=True))
        folder.write_csv(f"{NAME}.csv", ("treated", *_COLUMNS), _rows(found))
        folder.write_pictures(NAME, _picture(found))
        ends = {
            variant: {name: record[name] for name in ("accuracy", "unseen_accuracy")}
            for variant, record in found.items()
        }
        folder.write_description(identity, records, {"variants": ends})
    return found


def _settings(experiment: Experiment) -> FedBasisSettings:
    settings = settings_of(experiment)
    if settings.num_bases == 1:
        raise RunError("found method.num_bases 1, expected 2 or more to compare")
    return settings


_COLUMNS = ("round", "similarity", "entropy")


def _rows(found: Mapping[str, PartRecord]) -> Iterator[tuple[object, ...]]:
    for variant, record in found.items():
        pairs = zip(record["similarity"], record["entropy"], strict=True)
        for server_round, (similarity, entropy) in enumerate(pairs):
            known = similarity is not None
            yield variant, server_round, similarity, entropy if known else None


@styled
def _picture(found: Mapping[str, PartRecord]) -> Figure:
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (variant, record), (color, dashes) in zip(found.items(), _LINES, strict=True):
        known = [value is not None for value in record["similarity"]]
        rounds = [at for at, here in enumerate(known) if here]
        for axes, name in ((left, "similarity"), (right, "entropy")):
            values = [record[name][at] for at in rounds]
            label = variant if axes is left else None
            axes.plot(rounds, values, dashes, color=color.light, label=label)
    _label(left, "cosine similarity of the bases")
    _label(right, "entropy of the combinations / log K")
    figure.suptitle("FedBasis, by what is treated")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _label(axes: Axes, label: str) -> None:
    axes.set_xlabel("rounds")
    axes.set_ylabel(label)
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
