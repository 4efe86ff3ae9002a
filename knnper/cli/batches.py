"""The commands over many runs: ``knnper sweep``, ``compare`` and ``report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.counters import run_counter
from knnper.cli.errors import interruptible, typed_command
from knnper.cli.formats import counted
from knnper.cli.options import AsJson, Overrides, file_argument
from knnper.cli.terminal import print_json, print_shown, print_table, say, tell

# Modules that load torch are imported inside functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.simulation.batches.runner import Plan
    from knnper.simulation.reports.report import Report

ComparisonFile = Annotated[Path, file_argument("COMPARISON.yaml", "comparison")]
SweepFile = Annotated[Path, file_argument("SWEEP.yaml", "sweep")]
Output = Annotated[
    Path | None,
    typer.Option(help="The folder for all runs.", show_default="runs/NAME"),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Trainings side by side.", show_default="one a CPU core"),
]
Trained = Annotated[
    list[Path] | None,
    typer.Option(
        "--trained",
        metavar="RUN",
        help="A finished run with a training to reuse; may be repeated.",
        show_default=False,
    ),
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Folders of finished runs, comparisons or sweeps."
    ),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Print the whole report as Markdown.")
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write the report as one HTML page that works offline.",
    ),
]
CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Write the table with all figures."),
]
Metric = Annotated[
    str,
    typer.Option(
        "--metric", metavar="NAME", help="The table's metric, one of run.metrics."
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME",
        help="A name for a RUN in tables and charts; one for each RUN, in their order.",
        show_default=False,
    ),
]
FigureFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write each chart as SVG and as PDF."),
]


def compare(
    comparison: ComparisonFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Tune every method on validation data, then test it over several seeds.

    After an interruption, the same command resumes; finished runs are not repeated.
    """
    from knnper.simulation.batches.comparison import read_comparison

    _run(read_comparison(comparison, overrides or ()), output, workers, as_json)


def sweep(
    sweep: SweepFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    trained: Trained = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at many settings over several seeds; write tables and a plot.

    After an interruption, the same command resumes; finished runs are not repeated.
    """
    from knnper.process import import_extra
    from knnper.simulation.batches.sweep import read_sweep

    plan = read_sweep(sweep, overrides or ())
    if plan.settings.x is not None:
        import_extra("matplotlib", "report", "the plot of a sweep with x")
    _run(plan, output, workers, as_json, trained or ())


def _run(
    plan: "Plan",
    output: Path | None,
    workers: int | None,
    as_json: bool,
    trained: Sequence[Path] = (),
) -> None:
    from knnper.process import usable_cores
    from knnper.simulation.batches.outputs import write_batch
    from knnper.simulation.batches.runner import num_runs, num_steps, run_batch
    from knnper.simulation.batches.tables import documents_of, rows_of

    folder = output or Path("runs") / plan.name
    total, num_done = num_runs(plan, folder)
    say(f"{total} runs, {num_done} of them done already")
    with interruptible(folder), run_counter(num_steps(plan), "steps") as advance:
        outcomes = run_batch(
            plan, folder, workers or usable_cores(), advance, typed_command(), trained
        )
    rows = rows_of(plan, outcomes)
    shown = write_batch(plan, outcomes, rows, folder)
    print_shown(shown, documents_of(plan, outcomes, rows) if as_json else None)
    say(f"Tables, and the plot of a sweep with x, are in {folder}")


def report(
    runs: RunFolders,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
    html: HtmlFile = None,
    csv_file: CsvFile = None,
    figures: FigureFolder = None,
    metric: Metric = "accuracy",
    labels: Labels = None,
) -> None:
    """Compare finished runs: means and 95 % intervals over the seeds.

    Runs that differ in the seed alone are one row, for seen and for unseen clients.
    """
    if as_json and markdown:
        raise typer.BadParameter("give one of --json and --markdown, not both")
    _require_label_for_each(labels or [], runs)
    from knnper.process import import_extra

    import_extra("matplotlib", "report", "knnper report")
    from knnper.simulation.reports.accuracy_table import as_csv, as_documents
    from knnper.simulation.reports.pages import as_html, as_markdown_report, write_text
    from knnper.simulation.reports.report import report_of
    from knnper.simulation.reports.sections import write_figures

    whole = report_of(runs, labels or [])
    metrics = [name for chapter in whole.chapters for name in chapter.tables]
    if metric not in metrics:
        known = ", ".join(dict.fromkeys(metrics))
        raise typer.BadParameter(
            f"found {metric!r}, expected a metric of the runs: {known}",
            param_hint="--metric",
        )
    documents = [
        row
        for chapter in whole.chapters
        for row in as_documents(chapter.tables.get(metric, ()), chapter.over)
    ]
    if csv_file is not None:
        write_text(csv_file, as_csv(documents))
        say(f"The table with all figures is in {csv_file}")
    if html is not None:
        write_text(html, as_html(whole))
        say(f"The report is in {html}: one file, open it with a browser")
    if figures is not None:
        files = write_figures(whole.sections, figures)
        say(f"{len(files)} files are in {figures}")
    if markdown:
        tell(as_markdown_report(whole, figures))
    elif as_json:
        print_json(documents)
    else:
        _show(whole, metric)


def _require_label_for_each(labels: Sequence[str], runs: Sequence[Path]) -> None:
    if len(labels) not in (0, len(runs)) or not all(map(str.strip, labels)):
        numbers = f"{counted(len(labels), 'label')} for {counted(len(runs), 'RUN')}"
        raise typer.BadParameter(
            f"found {numbers}, expected one for each, in their order, and none of them "
            "empty",
            param_hint="--label",
        )


def _show(whole: "Report", metric: str) -> None:
    from knnper.simulation.reports.accuracy_table import as_cells
    from knnper.simulation.reports.estimate import WEAK_NOTE

    for number, chapter in enumerate(whole.chapters):
        if number > 0:
            tell()
        for sentence in chapter.verdict:
            tell(sentence)
        for name, fact in chapter.facts.items():
            tell(f"{name}: {fact}")
        header, *cells = as_cells(chapter.tables.get(metric, ()))
        print_table(header, cells)
        if chapter.is_weak:
            tell(WEAK_NOTE)
        for remark in chapter.remarks:
            say(remark)
    for remark in whole.remarks:
        say(remark)
