"""``knnper compare``: methods side by side, tuned on validation data."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from knnper_cli.terminal import (
    RUN_FAILED,
    AsJson,
    ExperimentFile,
    Overrides,
    counting,
    interruptible,
    print_json,
    print_shown,
    print_shown_or_json,
    print_table,
    progress_observer,
    roughly,
    run_counter,
    say,
    typed_command,
)

ComparisonFile = Annotated[
    Path, typer.Argument(metavar="COMPARISON.yaml", help="The comparison's file.")
]

Output = Annotated[
    Path | None,
    typer.Option(help="The folder of all its runs.", show_default="runs/NAME"),
]

Workers = Annotated[
    int | None, typer.Option(min=1, help="Runs side by side; one a CPU core.")
]


def compare(
    comparison: ComparisonFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Tune every method on validation data, then test them over several seeds.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # It loads torch, which `knnper --help` need not wait for.
    from knnper.simulation.batches.plan import read_comparison

    _run(read_comparison(comparison, overrides or ()), output, workers, as_json)


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
    total, there = num_runs(plan, folder)
    say(f"{total} runs, {there} of them there")
    with counting(num_steps(plan), "steps", folder) as advance:
        outcomes = run_batch(
            plan, folder, workers or usable_cores(), advance, typed_command(), trained
        )
    rows = rows_of(plan, outcomes)
    shown = write_batch(plan, outcomes, rows, folder)
    print_shown_or_json(shown, documents_of(plan, outcomes, rows), as_json=as_json)
    say(f"Tables, and the plot of a sweep with x, are in {folder}")


RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
]

OptionsOutput = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Where numbers and pictures go; a figure that was left there goes on.",
    ),
]

Seed = Annotated[
    int | None, typer.Option(help="Fixes every random choice.", show_default="0")
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were typed; the figure has the defaults of the others."""
    return {name: value for name, value in options.items() if value not in (None, [])}


if TYPE_CHECKING:
    from knnper.simulation.batches.plan import Plan
    from knnper.simulation.reports.figure import OnPart

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def progress(parts: str = "clients") -> "Iterator[OnPart]":
    """Yield what draws a bar on a terminal, and writes lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line_writer(say, parts=parts)
        return
    with Progress(*Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task(parts, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def line_writer(
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    parts: str = "clients",
) -> "OnPart":
    """Return what writes a line now and then, with the time that is left.

    Parameters
    ----------
    write
        Takes a line.
    clock
        Returns seconds.
    parts
        What is counted.
    """
    began = last = clock()
    at_first: int | None = None

    def on_part(done: int, total: int) -> None:
        nonlocal at_first, last
        if at_first is None:
            at_first = done
        now = clock()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = ""
        if at_first < done < total:
            seconds = (now - began) / (done - at_first) * (total - done)
            left = f", some {roughly(seconds)} left"
        write(f"{done}/{total} {parts}{left}")

    return on_part


if TYPE_CHECKING:
    from knnper.simulation.reports.figure_catalogue import FigureSpec, Subject


def draw_of_run(name: str, run: Path, output: Path, options: Mapping[str, Any]) -> None:
    """Draw a figure with the global model of a finished run."""
    from knnper.simulation.reports.figure_catalogue import OF_RUNS, parse_options
    from knnper.simulation.trained_model import trained_model

    parsed = parse_options(name, options)
    _draw(OF_RUNS[name], trained_model(run), output, parsed)


def draw_of_experiment(
    name: str,
    experiment: Path,
    overrides: Sequence[str],
    output: Path,
    options: Mapping[str, Any],
) -> None:
    """Draw a figure that trains what it shows."""
    from knnper.loading import read_experiment
    from knnper.simulation.reports.figure_catalogue import OF_EXPERIMENTS, parse_options
    from knnper.simulation.workbench import experiment_catalogue

    parsed = parse_options(name, options)
    settings = read_experiment(experiment, experiment_catalogue(), overrides)
    _draw(OF_EXPERIMENTS[name], settings, output, parsed)


def draw_of_nothing(name: str, output: Path, options: Mapping[str, Any]) -> None:
    """Draw a figure that needs neither a run nor an experiment."""
    from knnper.simulation.reports.figure_catalogue import OF_NOTHING, parse_options

    _draw(OF_NOTHING[name], None, output, parse_options(name, options))


def _draw(
    figure: "FigureSpec[Subject]", subject: "Subject", output: Path, options: object
) -> None:
    with progress(figure.parts) as on_part:
        shown = figure.make(subject, output, options, on_part)
    print_shown(shown)
    say(f"Numbers and pictures are in {output}")


def drift(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: OptionsOutput,
    clients: Annotated[
        int | None, typer.Option(help="M, the clients.", show_default="100")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="T, batches that arrive.", show_default="100")
    ] = None,
    shift_at: Annotated[
        int | None,
        typer.Option(help="t0, the batches before the shift.", show_default="50"),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Of both Dirichlet draws.", show_default="0.3"),
    ] = None,
    knn_weight: Annotated[
        float | None,
        typer.Option(help="Of all clients.", show_default="each chooses once"),
    ] = None,
    seed: Seed = None,
) -> None:
    """Follow a shift of the clients' data: fixed, FIFO and concatenate (Figure 14)."""
    options = given(
        clients=clients,
        steps=steps,
        shift_at=shift_at,
        alpha=alpha,
        knn_weight=knn_weight,
        seed=seed,
    )
    draw_of_run("drift", run, output, options)


def fedbasis_collapse(
    experiment: ExperimentFile, output: OptionsOutput, overrides: Overrides = None
) -> None:
    """Train FedBasis with and without what keeps its bases apart (Figure 2)."""
    name = "fedbasis-collapse"
    draw_of_experiment(name, experiment, overrides or (), output, {})


def memory(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: OptionsOutput,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="capacity (Figure 1), knn-weight (2), neighbors (5), kernel-scale "
            "(7), best-weight (8) or hardware (9); may be repeated.",
            show_default="all",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="M, the new clients.", show_default="the run's unseen ones"),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(
            help="Of the lines of `capacity`; may be repeated.",
            show_default="0.1 0.3 0.5 0.7 1",
        ),
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(
            help="A client's images, on average, in `knn-weight`; may be repeated.",
            show_default="1/50, 1/10, 2/5 and all of those it has",
        ),
    ] = None,
    deals: Annotated[
        int | None,
        typer.Option(help="How often the images are dealt anew.", show_default="3"),
    ] = None,
    seed: Seed = None,
) -> None:
    """Give new clients memories of other sizes and settings (Figures 1, 2, 5, 7-9)."""
    options = given(
        only=only, clients=clients, alpha=alpha, size=size, deals=deals, seed=seed
    )
    draw_of_run("memory", run, output, options)


def protonn(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: OptionsOutput,
    clients: Annotated[
        int | None,
        typer.Option(
            help="The first so many of the run's clients.",
            show_default="50, or all with --full",
        ),
    ] = None,
    capacity: Annotated[
        list[float] | None,
        typer.Option(
            help="Prototypes by a client's examples; may be repeated.",
            show_default="0.1 0.3 0.6 1; 0.1 0.2 ... 1 with --full",
        ),
    ] = None,
    dim: Annotated[
        list[int] | None,
        typer.Option(
            help="Projection dimension; may be repeated.",
            show_default="4, or 13 with --full, up to that of the embeddings",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All clients and the paper's whole grid.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Steps of training.", show_default="30")
    ] = None,
    seed: Seed = None,
) -> None:
    """Replace the stores by few learned prototypes (Figure 11)."""
    options = given(
        clients=clients,
        capacity=capacity,
        dim=dim,
        full=full or None,
        steps=steps,
        seed=seed,
    )
    draw_of_run("protonn", run, output, options)


def quality(
    experiment: ExperimentFile,
    output: OptionsOutput,
    epochs: Annotated[
        list[float] | None,
        typer.Option(
            help="Passes over the data after which the model is kept; may be repeated.",
            show_default="0 0.1 0.3 1 3 10 30",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="M, the new clients.", show_default="the unseen ones"),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="May be repeated.", show_default="0.1 0.3 1"),
    ] = None,
    deals: Annotated[
        int | None,
        typer.Option(help="How often the images are dealt anew.", show_default="3"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a model centrally; add the memory at stages of it (Figures 3, 12, 13)."""
    options = given(epochs=epochs, clients=clients, alpha=alpha, deals=deals)
    draw_of_experiment("quality", experiment, overrides or (), output, options)


def three_approaches(
    output: OptionsOutput,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            help="Of each user; may be repeated.",
            show_default="3 5 10 30 100 200",
        ),
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            help="Of HypCluster; may be repeated.", show_default="1 2 3 4 5 6 8"
        ),
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="p, the users.", show_default="100")
    ] = None,
    seed: Seed = None,
) -> None:
    """Compare clusters, mixed data and mixed models on synthetic users (Figure 2)."""
    options = given(samples=samples, clusters=clusters, users=users, seed=seed)
    draw_of_nothing("three-approaches", output, options)


figure = typer.Typer(
    name="figure",
    no_args_is_help=True,
    help="Draw a figure of the papers, most with the global model of a finished run.",
)

for _command in (
    memory,
    quality,
    drift,
    protonn,
    fedbasis_collapse,
    three_approaches,
):
    figure.command()(_command)


if TYPE_CHECKING:
    from knnper.simulation.reports.report import Report

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
    from knnper.simulation.reports.report import report_of

    made = report_of(runs)
    if csv_file is not None:
        _write_csv(made, csv_file)
    if html is not None:
        _write_html(made, html)
    if figures is not None:
        _write_figures(made, figures)
    if markdown:
        from knnper.simulation.reports.report import as_markdown_report

        typer.echo(as_markdown_report(made, figures))
    elif as_json:
        print_json(_documents(made))
    else:
        _show(made)


def _show(made: "Report") -> None:
    from knnper.simulation.reports.runs import as_cells

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
    from knnper.simulation.reports.runs import as_documents

    return [row for one in made.chapters for row in as_documents(one.rows, one.over)]


def _write_csv(made: "Report", path: Path) -> None:
    from knnper.simulation.reports.report import write_text
    from knnper.simulation.reports.runs import as_csv

    write_text(path, as_csv(_documents(made)))
    say(f"The table with all figures is in {path}")


def _write_figures(made: "Report", folder: Path) -> None:
    from knnper.simulation.reports.report import write_figures

    say(f"{len(write_figures(made.sections, folder))} files are in {folder}")


def _write_html(made: "Report", path: Path) -> None:
    from knnper.simulation.reports.report import as_html, write_text

    write_text(path, as_html(made))
    say(f"The report is in {path}: one file, open it with a browser")


if TYPE_CHECKING:
    from knnper.simulation.reports.reproduce import Played

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Files of figures, sweeps, comparisons and experiments.",
    ),
]

ReproduceOutput = Annotated[
    Path, typer.Option(metavar="FOLDER", help="A folder for each file, and the report.")
]

ReproduceWorkers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes side by side; one a CPU core."),
]

SkipMissingData = Annotated[
    bool,
    typer.Option(
        "--skip-missing-data",
        help="Leave out files whose data are not there, in place of failing.",
    ),
]


def reproduce(
    files: Files,
    output: ReproduceOutput = Path("runs/reproduced"),
    workers: ReproduceWorkers = None,
    skip_missing_data: SkipMissingData = False,
) -> None:
    """Play protocol files one after the other; leave one report with all figures.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # All below loads torch, which `knnper --help` need not wait for.
    pass
    from knnper.simulation.reports.reproduce import Player, read_protocols, write_report

    protocols = read_protocols(files)
    player = Player(output, workers, TerminalWatcher(), skip_missing_data)
    with interruptible(output):
        played = player.play_all(protocols)
        page = write_report(played, output)
    say(f"The report is in {page}: one file, open it with a browser")
    _end(played)


def _end(played: "list[Played]") -> None:
    """Say what failed, and exit with that."""
    failed = [one.protocol.name for one in played if one.failure is not None]
    if failed:
        say(f"{len(failed)} of {len(played)} files failed: {', '.join(failed)}")
        raise typer.Exit(RUN_FAILED)


if TYPE_CHECKING:
    from knnper.server.observer import Observer
    from knnper.simulation.batches.progress import Advance
    from knnper.simulation.reports.figure import OnPart
    from knnper.simulation.reports.reproduce import Protocol


class TerminalWatcher:
    """Writes a line before each file, and draws a bar for each piece of work."""

    def begins(self, number: int, total: int, protocol: "Protocol") -> None:
        """Say which file comes now."""
        say(f"{number} of {total}  {protocol.name} ({protocol.kind})")

    def fails(self, protocol: "Protocol", reason: str) -> None:
        """Say at once why a file is not played to its end."""
        say(f"{protocol.name} is not done: {reason}")

    def counting(self, total: int, noun: str) -> "AbstractContextManager[Advance]":
        """Return the bar of a sweep or a comparison."""
        return run_counter(total, noun)

    def observing(self) -> "AbstractContextManager[Observer]":
        """Return the bars of a run."""
        return progress_observer()

    def drawing(self, parts: str) -> "AbstractContextManager[OnPart]":
        """Return the bar of a figure."""
        return progress(parts)


SweepFile = Annotated[
    Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep's file.")
]

SweepWorkers = Annotated[
    int | None, typer.Option(min=1, help="Trainings side by side; one a CPU core.")
]

Trained = Annotated[
    list[Path] | None,
    typer.Option(
        "--trained",
        metavar="RUN",
        help="A finished run whose training is not made anew; may be repeated.",
        show_default=False,
    ),
]


def sweep(
    sweep: SweepFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: SweepWorkers = None,
    trained: Trained = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at many settings over several seeds; write tables and a plot.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # It loads torch, which `knnper --help` need not wait for.
    from knnper.simulation.batches.plan import read_sweep

    _run(read_sweep(sweep, overrides or ()), output, workers, as_json, trained or ())
