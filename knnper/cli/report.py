"""``knnper report``: finished runs side by side, as a table and as a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from simulation.reporting.report import Report

RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Folders of finished runs, of comparisons or of sweeps.",
    ),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Write the whole report as Markdown.")
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write the report as one page that needs no net."
    ),
]
CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Write the table with all figures."),
]
FigureFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write each chart as SVG and as PDF."),
]


def report(
    runs: RunFolders,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
    html: HtmlFile = None,
    csv_file: CsvFile = None,
    figures: FigureFolder = None,
) -> None:
    """Compare finished runs: means and 95 % intervals over the seeds.

    Runs that differ in the seed alone are one row, for seen and for unseen clients.
    """
    if as_json and markdown:
        raise typer.BadParameter("give one of --json and --markdown, not both")
    # All below loads torch, which `knnper --help` need not wait for.
    from simulation.reporting.report import report_of

    made = report_of(runs)
    if csv_file is not None:
        _write_csv(made, csv_file)
    if html is not None:
        _write_html(made, html)
    if figures is not None:
        _write_figures(made, figures)
    if markdown:
        from simulation.reporting.page import as_markdown_report

        typer.echo(as_markdown_report(made, figures))
    elif as_json:
        print_json(_documents(made))
    else:
        _show(made)


def _show(made: "Report") -> None:
    from simulation.reporting.table import as_cells

    for number, chapter in enumerate(made.chapters):
        if number > 0:
            typer.echo()
        typer.echo("\n".join(f"{name}: {told}" for name, told in chapter.facts.items()))
        header, *cells = as_cells(chapter.rows)
        print_table(header, cells)
        for remark in chapter.remarks:
            say(remark)
    for remark in made.remarks:
        say(remark)


def _documents(made: "Report") -> list[dict[str, Any]]:
    from simulation.reporting.table import as_documents

    return [row for one in made.chapters for row in as_documents(one.rows, one.over)]


def _write_csv(made: "Report", path: Path) -> None:
    from simulation.reporting.files import write_text
    from simulation.reporting.table import as_csv

    write_text(path, as_csv(_documents(made)))
    say(f"The table with all figures is in {path}")


def _write_figures(made: "Report", folder: Path) -> None:
    from simulation.reporting.files import write_figures

    say(f"{len(write_figures(made.sections, folder))} files are in {folder}")


def _write_html(made: "Report", path: Path) -> None:
    from simulation.reporting.files import write_text
    from simulation.reporting.page import as_html

    write_text(path, as_html(made))
    say(f"The report is in {path}: one file, open it with a browser")
