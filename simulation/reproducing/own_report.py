"""The page on the runs of one file, as ``knnper report`` makes it."""

from pathlib import Path

from simulation.reporting.files import write_figures, write_text
from simulation.reporting.page import as_html
from simulation.reporting.report import findings_of, report_of
from simulation.showing import Chart

PAGE = "report.html"


def write_own_report(folder: Path) -> tuple[Chart, ...]:
    """Write the page on a run, or on those in a folder; return its first chart.

    The chart is written beside the page, as SVG and PDF.

    Raises
    ------
    RunError
        If no run is done, or one is damaged.
    """
    report = report_of(findings_of([folder]))
    write_text(folder / PAGE, as_html(report))
    first = report.sections[0]
    write_figures([first], folder)
    if first.picture is None:
        return ()
    figure = first.picture.figure
    return (Chart(first.name, f"{first.title}. {first.text}", lambda: figure),)
