"""The charts of a report, each with what it shows, in their order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from simulation.figures.palette import Color, colors_of
from simulation.reporting.curves import draw_curves
from simulation.reporting.drawing import (
    MOST_SHOWN,
    Picture,
    report_style,
    settle,
)
from simulation.reporting.knn_weights import draw_weights
from simulation.reporting.overview import draw_averages
from simulation.reporting.partition_picture import draw_partition
from simulation.reporting.reliability import draw_reliability
from simulation.reporting.scatter import draw_scatters
from simulation.reporting.setups import Setup, split_of
from simulation.reporting.store_size import draw_store_sizes
from simulation.reporting.table import Row

Colors = Mapping[str, Color]


@dataclass(frozen=True)
class Section:
    """A chart with its heading.

    Attributes
    ----------
    name
        Names its file and its place in the page.
    title
        The heading.
    text
        How to read the chart; or why there is none.
    picture
        The chart; None where the runs lack what it shows.
    """

    name: str
    title: str
    text: str
    picture: Picture | None


@dataclass(frozen=True)
class _Kind:
    """What a section is made of, whatever the runs; ``text`` may name the split."""

    name: str
    title: str
    text: str
    missing: str
    draw: Callable[[Sequence[Setup], Colors], Picture | None]
    is_of_each_setup: bool = True


_AVERAGES = (
    "A dot is the mean over the seeds, its line the 95 % interval of the mean, cut at "
    "0 and 100 %; diamonds are unpersonalised models."
)

_KINDS = (
    _Kind(
        "curves",
        "Learning curves",
        "A thin line is a seed, a thick one the mean over the seeds. Setups that train "
        "alike share a line.",
        "The runs have no rounds: nothing was trained, or rounds.jsonl is missing.",
        draw_curves,
    ),
    _Kind(
        "clients",
        "Client by client",
        "Each client's accuracy with the global and with its own model. Above the "
        "diagonal a client gains by its own model, below it loses. Filled circles are "
        "seen clients, hollow squares unseen ones; the area is the number of clients "
        "at that point, all seeds together. Methods whose global model means nothing "
        "by itself have no panel.",
        "No client's model differs from a global one that means anything by itself, or "
        "clients.csv is missing.",
        draw_scatters,
    ),
    _Kind(
        "store-sizes",
        "Size of the memory",
        "Clients in classes of about as many each, by the examples in their memory; a "
        "point is the share of all their {split} examples that are right. Coloured "
        "circles are the clients' own models, grey squares the global one where it "
        "means anything by itself.",
        "No method here keeps a memory.",
        draw_store_sizes,
    ),
    _Kind(
        "weights",
        "Weight of the memory",
        "The λ that each client chose. At 0 a client uses the global model alone, at 1 "
        "its memory alone. Filled bars are seen clients, hollow ones on top of them "
        "unseen clients, all seeds together.",
        "No method here mixes in a memory.",
        draw_weights,
    ),
    _Kind(
        "reliability",
        "Calibration",
        "The clients' {split} examples in 15 bins by the largest probability. On the "
        "diagonal a model is right as often as it says; below it is too sure of "
        "itself. The area of a point is its part of the examples. Grey squares are the "
        "global model, where it means anything by itself. The error is the expected "
        "calibration error, all seeds pooled.",
        "The runs have no bins: personalization.jsonl is missing, or the clients keep "
        "their figures to themselves.",
        draw_reliability,
    ),
    _Kind(
        "partition",
        "Who has what",
        "Above, each client's training and validation examples; below, how many of "
        "each label: the denser, the more. Another seed gives another split.",
        "No run has partition.json, which a simulation writes when it starts: the data "
        "stays with the sites, or an earlier version made the runs.",
        lambda setups, _: draw_partition(setups),
        is_of_each_setup=False,
    ),
)


def draw_sections(
    setups: Sequence[Setup], rows: Sequence[Row], prefix: str = ""
) -> list[Section]:
    """Return all sections; a chart that the runs have no data for is left out.

    Parameters
    ----------
    setups
        All over the same data set and partition.
    rows
        The table of them.
    prefix
        Begins the sections' names, where a report has others of the same kind.
    """
    ordered = _most_telling(setups)
    colors = dict(
        zip(
            (setup.label for setup in ordered),
            colors_of(setup.title for setup in ordered),
            strict=True,
        )
    )
    with report_style():
        averages = draw_averages(rows, colors, split_of(ordered))
        text = _AVERAGES if averages else "No client reported any figure."
        sections = [
            Section("averages", "Averages", text, averages),
            *(_section(kind, ordered, colors) for kind in _KINDS),
        ]
        for section in sections:
            if section.picture is not None:
                settle(section.picture)
    return [replace(one, name=prefix + one.name) for one in sections]


def _most_telling(setups: Sequence[Setup]) -> list[Setup]:
    """Return the setups as they are; the best first where not all can be drawn."""
    if len(setups) <= MOST_SHOWN:
        return list(setups)

    def average(setup: Setup) -> float:
        return sum(run.average for run in setup.runs) / len(setup.runs)

    return sorted(setups, key=average, reverse=True)


def _section(kind: _Kind, setups: Sequence[Setup], colors: Colors) -> Section:
    picture = kind.draw(setups, colors)
    text = kind.text.format(split=split_of(setups)) if picture else kind.missing
    if picture and kind.is_of_each_setup and len(setups) > MOST_SHOWN:
        text += (
            f" At most {MOST_SHOWN} of the {len(setups)} setups are drawn: those with "
            "the largest average over the seen clients."
        )
    return Section(kind.name, kind.title, text, picture)
