"""The three-approaches figure: from its settings to numbers and a picture."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_jsonable_python

from simulation.figures.folder import FigureFolder, OnPart, PartRecord
from simulation.figures.mixture_losses import Measurements
from simulation.figures.options import ThreeApproachesOptions
from simulation.figures.palette import SOFT, colors_of
from simulation.figures.style import styled
from simulation.figures.three_approaches import (
    APPROACHES,
    HYPCLUSTER,
    ThreeApproachesSettings,
    hypcluster,
    least_losses,
)
from simulation.showing import Chart, Shown, Table

NAME = "three-approaches"
TITLE = "Clusters, mixed data and mixed models on synthetic users (Figure 2)"
_MARKERS = "osv^D*P"
_METHODS = {"Global (FedAvg)": "FedAvg"}
"""By title, where a method has another name in reports."""


@dataclass(frozen=True)
class ThreeApproaches:
    """The figure's numbers.

    Attributes
    ----------
    by_samples
        For each approach the records of `Measurements.measure`, in the order of
        ``settings.samples``.
    by_clusters
        Those of HypCluster, in the order of ``settings.clusters``.
    least
        See `least_losses`.
    """

    by_samples: Mapping[str, Sequence[PartRecord]]
    by_clusters: Sequence[PartRecord]
    least: Mapping[str, float]


def show_three_approaches(
    _: None, output: Path, options: ThreeApproachesOptions, on_part: OnPart
) -> Shown:
    """Make the figure as `draw_three_approaches` does; return what it shows."""
    settings = ThreeApproachesSettings(options.samples, options.clusters, options.users)
    found = draw_three_approaches(settings, output, options.seed, on_part)
    draw = functools.partial(_picture, found, settings)
    return Shown(_tables(found, settings), (Chart(NAME, TITLE, draw),))


def _tables(
    found: ThreeApproaches, settings: ThreeApproachesSettings
) -> tuple[Table, ...]:
    of_samples = tuple(
        (title, *map(_loss, records)) for title, records in found.by_samples.items()
    )
    of_clusters = ("HypCluster", *map(_loss, found.by_clusters))
    return (
        Table(
            "Test loss (nats) by samples per user",
            ("samples per user", *map(str, settings.samples)),
            of_samples,
        ),
        Table(
            "Test loss (nats) of HypCluster by clusters",
            ("clusters", *map(str, settings.clusters)),
            (of_clusters,),
        ),
    )


def _loss(record: PartRecord) -> str:
    return f"{record['test_loss']:.3f}"


def draw_three_approaches(
    settings: ThreeApproachesSettings, output: Path, seed: int, on_part: OnPart
) -> ThreeApproaches:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes three-approaches.csv, .png, .svg, .pdf and .json.

    Parameters
    ----------
    settings
        What is shown.
    output
        The folder.
    seed
        Fixes every random choice.
    on_part
        Is told of every point that is done.

    Raises
    ------
    RunError
        If the folder holds something else, or training fails.
    """
    identity = {
        "figure": NAME,
        "seed": seed,
        "settings": to_jsonable_python(settings),
    }
    parts = _parts(settings, seed)
    with FigureFolder.open(output, identity) as folder:
        records = folder.finish(list(parts), lambda name: parts[name](), on_part)
        found = _collected(records, settings)
        header = ("samples", "clusters", "approach", "validation_loss", "test_loss")
        folder.write_csv(f"{NAME}.csv", (*header, "chosen"), _rows(found, settings))
        folder.write_pictures(NAME, _picture(found, settings))
        folder.write_description(identity, records, {"least_loss": dict(found.least)})
    return found


def _parts(
    settings: ThreeApproachesSettings, seed: int
) -> Mapping[str, Callable[[], PartRecord]]:
    of_samples = {
        f"{count} samples": functools.partial(_of_samples, settings, count, seed)
        for count in settings.samples
    }
    of_clusters = {
        f"{count} clusters": functools.partial(_of_clusters, settings, count, seed)
        for count in settings.clusters
    }
    return {**of_samples, **of_clusters}


def _of_samples(
    settings: ThreeApproachesSettings, num_samples: int, seed: int
) -> PartRecord:
    measurements = Measurements(settings, num_samples, seed)
    starts = range(seed, seed + settings.num_starts)
    approaches = {**APPROACHES, HYPCLUSTER: hypcluster(4, starts)}
    return {title: measurements.measure(one) for title, one in approaches.items()}


def _of_clusters(
    settings: ThreeApproachesSettings, num_clusters: int, seed: int
) -> PartRecord:
    measurements = Measurements(settings, settings.samples_for_clusters, seed)
    starts = range(seed, seed + settings.num_starts)
    return measurements.measure(hypcluster(num_clusters, starts, rates=(1.0,)))


def _collected(
    records: Sequence[PartRecord], settings: ThreeApproachesSettings
) -> ThreeApproaches:
    count = len(settings.samples)
    by_samples = {
        title: [record[title] for record in records[:count]]
        for title in (*APPROACHES, HYPCLUSTER)
    }
    return ThreeApproaches(
        by_samples, records[count:], least_losses(settings.num_users)
    )


def _rows(
    found: ThreeApproaches, settings: ThreeApproachesSettings
) -> Iterator[Sequence[object]]:
    def row(record: PartRecord) -> Sequence[object]:
        chosen = ", ".join(f"{name} {one}" for name, one in record["chosen"].items())
        return record["validation_loss"], record["test_loss"], chosen

    for title, records in found.by_samples.items():
        clusters = 4 if title == HYPCLUSTER else None
        for samples, record in zip(settings.samples, records, strict=True):
            yield samples, clusters, title, *row(record)
    for number, record in zip(settings.clusters, found.by_clusters, strict=True):
        yield settings.samples_for_clusters, number, "HypCluster", *row(record)


@styled
def _picture(found: ThreeApproaches, settings: ThreeApproachesSettings) -> Figure:
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    styles = _styles(found.by_samples)
    for title, records in found.by_samples.items():
        losses = [record["test_loss"] for record in records]
        left.plot(settings.samples, losses, label=title, **styles[title])
    left.set_xscale("log")
    left.set_xticks(settings.samples, [str(count) for count in settings.samples])
    left.minorticks_off()
    left.set_xlabel("samples per user")
    left.set_ylabel("test loss (nats)")
    losses = [record["test_loss"] for record in found.by_clusters]
    right.plot(settings.clusters, losses, **styles[HYPCLUSTER])
    right.set_xlabel(f"clusters, {settings.samples_for_clusters} samples per user")
    right.set_xticks(settings.clusters)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for loss in found.least.values():
            axes.axhline(loss, color=SOFT.light, linestyle=":", linewidth=1)
    _name_least(left, found.least)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _styles(titles: Collection[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return how the line of each approach looks."""
    colors = colors_of(_METHODS.get(title, title) for title in titles)
    return {
        title: {"color": color.light, "marker": marker, "markersize": 4}
        for title, color, marker in zip(titles, colors, _MARKERS, strict=True)
    }


def _name_least(axes: Axes, least: Mapping[str, float]) -> None:
    """Say of what the smallest losses are that are possible."""
    for name, loss in least.items():
        # Where no curve is: they come down to the lines from above, on the right.
        is_lowest = loss == min(least.values())
        axes.annotate(
            f"best with {name}",
            (0.0 if is_lowest else 1.0, loss),
            xycoords=("axes fraction", "data"),
            xytext=(3, 2) if is_lowest else (-3, -2),
            textcoords="offset points",
            horizontalalignment="left" if is_lowest else "right",
            verticalalignment="bottom" if is_lowest else "top",
            fontsize="x-small",
            color=SOFT.light,
        )
