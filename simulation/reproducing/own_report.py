"""The page on the runs of one file, as ``knnper report`` makes it."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from knnper.config.errors import RunError
from simulation.reporting.drawing import Picture
from simulation.reporting.files import write_figures, write_text
from simulation.reporting.page import as_html
from simulation.reporting.report import report_of
from simulation.showing import Chart

PAGE = "report.html"


def write_own_report(
    folder: Path, runs: Iterable[Path], remarks: Sequence[str] = ()
) -> tuple[Chart, ...]:
    """Write the page on runs; return its first chart, one a data set and partition.

    It is written beside the page, as SVG and PDF.

    Parameters
    ----------
    folder
        Where to. Runs that the file no longer asks for may be there too.
    runs
        The folders of those that it asks for, and that have results.
    remarks
        What else to tell of them.

    Raises
    ------
    RunError
        If there is no run, or one is not done or damaged.
    """
    # What two points of a sweep or two rows have in common is one run.
    paths = list(dict.fromkeys(runs))
    if not paths:
        raise RunError(f"no run of the file has results: {' '.join(remarks)}")
    report = report_of(paths)
    report = replace(report, remarks=(*remarks, *report.remarks))
    write_text(folder / PAGE, as_html(report))
    firsts = [chapter.sections[0] for chapter in report.chapters]
    write_figures(firsts, folder)
    titles = [chapter.over.title for chapter in report.chapters]
    return tuple(
        Chart(
            first.name,
            f"{first.title}{f', {title}' if len(titles) > 1 else ''}. {first.text}",
            functools.partial(_figure, first.picture),
        )
        for first, title in zip(firsts, titles, strict=True)
        if first.picture is not None
    )


def _figure(picture: Picture) -> Figure:
    return picture.figure
