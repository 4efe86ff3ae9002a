"""The chart sections of a report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from knnper.errors import RunError
from knnper.simulation.reports.accuracy_chart import draw_averages
from knnper.simulation.reports.accuracy_table import ModelRow
from knnper.simulation.reports.client_charts import (
    draw_scatters,
    draw_store_sizes,
    draw_weights,
)
from knnper.simulation.reports.curves import draw_curves
from knnper.simulation.reports.figure import colors_of, settle, write_pictures
from knnper.simulation.reports.partition_chart import draw_partition
from knnper.simulation.reports.picture import (
    MOST_SHOWN,
    Colors,
    DescribedChart,
    report_style,
)
from knnper.simulation.reports.reliability import draw_reliability
from knnper.simulation.reports.setups import Setup, split_of

_AVERAGES = (
    "A dot is the mean over the seeds, its line the 95 % interval of the mean, cut at "
    "0 and 100 %, and dotted where it is of two seeds; diamonds are unpersonalised "
    "models."
)


@dataclass(frozen=True)
class Section:
    """A chart with its heading."""

    name: str
    title: str
    text: str
    picture: DescribedChart | None


@dataclass(frozen=True)
class _SectionKind:
    """A section that every report has.

    Attributes
    ----------
    text
        Explains the chart; may contain ``{split}``.
    missing
        Stands in place of a chart that the runs have no data for.
    is_of_each_setup
        Whether the chart shows each setup, up to `MOST_SHOWN`.
    """

    name: str
    title: str
    text: str
    missing: str
    draw: Callable[[Sequence[Setup], Colors], DescribedChart | None]
    is_of_each_setup: bool = True


_KINDS = (
    _SectionKind(
        "curves",
        "Learning curves",
        "A thin line is a seed, a thick one the mean over the seeds. Setups with equal "
        "training share a line.",
        "The runs have no rounds: nothing was trained, or rounds.jsonl is missing.",
        draw_curves,
    ),
    _SectionKind(
        "clients",
        "Client by client",
        "Each client's accuracy with the global and with its own model. Above the "
        "diagonal a client gains by its own model, below it loses. Filled circles are "
        "seen clients, hollow squares unseen clients; the area is the number of "
        "clients at that point, all seeds together. Methods whose global model is "
        "untrained have no panel.",
        "No client's model differs from a trained global one, or clients.csv is "
        "missing.",
        draw_scatters,
    ),
    _SectionKind(
        "store-sizes",
        "Size of the memory",
        "Clients in classes of about equal number, by the examples in their memory; a "
        "point is the accuracy over all their {split} examples. Coloured circles are "
        "the clients' own models, grey squares the global model, if it is trained.",
        "No method of these runs keeps a memory.",
        draw_store_sizes,
    ),
    _SectionKind(
        "weights",
        "Weight of the memory",
        "The λ that each client chose. At 0 a client uses the global model alone, at 1 "
        "its memory alone. Filled bars are seen clients, hollow bars on top of them "
        "unseen clients, all seeds together.",
        "No method of these runs mixes in a memory.",
        draw_weights,
    ),
    _SectionKind(
        "reliability",
        "Calibration",
        "The clients' {split} examples in 15 bins by the largest probability. On the "
        "diagonal the confidence equals the accuracy; below it the model is "
        "overconfident. The area of a point is its part of the examples. Grey squares "
        "are the global model, if it is trained. The error is the expected calibration "
        "error, all seeds pooled.",
        "The runs have no bins: personalization.jsonl is missing, or the clients "
        "withhold their figures.",
        draw_reliability,
    ),
    _SectionKind(
        "partition",
        "Partition",
        "Above, each client's training and validation examples; below, their number "
        "by label: the denser, the more, as in the scale on the right. Another seed "
        "gives another split.",
        "No run has partition.json, which a simulation writes when it starts: the data "
        "stays with the sites.",
        lambda setups, _: draw_partition(setups),
        is_of_each_setup=False,
    ),
)


def average_of(setup: Setup) -> float:
    """Return the average accuracy over the seen clients, the mean over the seeds."""
    return fmean(run.average for run in setup.runs)


def draw_sections(
    setups: Sequence[Setup], rows: Sequence[ModelRow], prefix: str = ""
) -> list[Section]:
    """Draw all sections; those without data have no picture."""
    ordered = list(setups)
    split = split_of(setups)
    is_cut = len(ordered) > MOST_SHOWN
    if is_cut:  # draw the best setups
        ordered.sort(key=lambda setup: -average_of(setup))
    shades = colors_of(setup.title for setup in ordered)
    colors = {setup.label: shade for setup, shade in zip(ordered, shades, strict=True)}
    with report_style():
        averages = draw_averages(rows, colors, split)
        text = _AVERAGES if averages else "No client reported any figure."
        sections = [Section(f"{prefix}averages", "Averages", text, averages)]
        for kind in _KINDS:
            picture = kind.draw(ordered, colors)
            text = kind.text.format(split=split) if picture else kind.missing
            if picture and kind.is_of_each_setup and is_cut:
                text += (
                    f" At most {MOST_SHOWN} of the {len(ordered)} setups are drawn: "
                    "those with the largest average over the seen clients."
                )
            if picture and picture.note:
                text += f" {picture.note}"
            sections.append(Section(prefix + kind.name, kind.title, text, picture))
        for section in sections:
            if section.picture is not None:
                settle(section.picture.figure)
    return sections


def write_figures(sections: Iterable[Section], folder: Path) -> list[Path]:
    """Write each chart as NAME.svg and NAME.pdf; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            path
            for section in sections
            if section.picture is not None
            for path in write_pictures(
                folder, section.name, section.picture.figure, ("svg", "pdf")
            )
        ]
    except OSError as error:
        raise RunError(f"figures cannot be written to {folder}: {error}") from error
