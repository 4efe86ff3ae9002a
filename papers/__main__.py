"""``python -m papers``: make the papers' figures from files or from a run."""

from pathlib import Path
from typing import Annotated

import typer

from knnper import ConfigError, Experiment, Problem
from knnper.cli.errors import RUN_FAILED, ErrorReportingGroup, interruptible
from knnper.cli.options import Overrides
from knnper.cli.terminal import print_shown, say
from knnper.experiment_file import read_experiment
from knnper.files import write_atomically
from knnper.server.observer import RoundRecord
from knnper.server.run_folder import EXPERIMENT
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.experiments import find_experiment
from knnper.simulation.reports.table import Shown
from knnper.simulation.trained_model import TrainedModel, trained_model
from knnper.yaml_text import parse_yaml
from papers.catalogue import FIGURES, NOTHING, RUN, make_figure, parse_options
from papers.figures import markdown_of, over_runs
from papers.files import read_files
from papers.gains import read_gains, write_gains
from papers.hours import write_hours
from papers.pfllib import pfllib
from papers.report import write_report
from papers.reproduce import Maker, Watcher, progress
from papers.rounds import read_rounds, shown
from papers.sizes import write_sizes

app = typer.Typer(
    name="python -m papers",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make the papers' figures and tables.",
)
Output = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder of numbers and pictures.")
]
Runs = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Folder with a folder for each comparison, named like its file; missing "
        "runs are made.",
    ),
]


@app.command()
def reproduce(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of figures, sweeps, comparisons and experiments.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder of the report and of a folder for each file."
        ),
    ] = Path("runs/reproduced"),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel processes; default: one per CPU core."),
    ] = None,
    skip_missing_data: Annotated[
        bool,
        typer.Option(
            "--skip-missing-data",
            help="Leave out files with missing data instead of failing.",
        ),
    ] = False,
) -> None:
    """Make the figures, sweeps, comparisons and runs of files, and write one report."""
    descriptions = read_files(files)
    maker = Maker(output, workers, Watcher(), skip_missing_data)
    with interruptible(output):
        results = maker.make_all(descriptions)
        page = write_report(results, output)
    say(f"The report is in {page}: one file, open it with a browser")
    failed = [result.file.name for result in results if result.failure is not None]
    if failed:
        say(f"{len(failed)} of {len(results)} files failed: {', '.join(failed)}")
        raise typer.Exit(RUN_FAILED)


@app.command()
def figure(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"One of {', '.join(FIGURES)}.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder of numbers and pictures; resumes an unfinished figure.",
        ),
    ],
    of: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Folder of a finished run, or file of an experiment; repeat for means "
            "with intervals.",
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings of the figure, such as partitions=5.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Make one figure of a finished run, or of an experiment to train."""
    settings = parse_options(name, dict(map(_option, options or ())))
    chosen = FIGURES[name]
    sources = of or []
    lacks_source = not sources and chosen.needs != NOTHING
    has_no_use = bool(sources) and chosen.needs == NOTHING
    if lacks_source or has_no_use or (overrides and chosen.needs == RUN):
        raise typer.BadParameter(f"{name} needs {chosen.needs}")
    # The experiment file in a run's folder belongs to this run alone.
    names = [
        source.parent.name if source.name == EXPERIMENT else source.stem
        for source in sources
    ]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"found {', '.join(names)}, expected different names")

    def make(source: Path | None, place: Path) -> Shown:
        subject: TrainedModel | Experiment | None = None
        if source is not None and chosen.needs == RUN:
            subject = trained_model(source)
        elif source is not None:
            subject = read_experiment(
                find_experiment(source), experiment_catalogue(), overrides or ()
            )
        with progress(chosen.parts) as on_part:
            return make_figure(name, subject, settings, place, on_part)

    if len(sources) < 2:
        print_shown(make(sources[0] if sources else None, output))
    else:
        places = [output / place for place in names]
        drawings = list(map(make, sources, places))
        means = over_runs([drawing.tables for drawing in drawings])
        write_atomically(output / f"{name}.md", markdown_of(means))
        print_shown(Shown(tuple(means)))
    say(f"Numbers and pictures are in {output}")


@app.command()
def gains(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files of comparisons."),
    ],
    output: Output,
    runs: Runs = Path("runs"),
    row: Annotated[
        str, typer.Option(metavar="NAME", help="The row with the memory.")
    ] = "knn_per",
) -> None:
    """Draw the gain of a memory by clients' size, skew and global accuracy."""
    with interruptible(runs):
        table = write_gains(read_gains(files, runs, row), output)
    print_shown(Shown((table,)))
    say(f"Numbers and pictures are in {output}")


@app.command()
def hours(
    file: Annotated[Path, typer.Argument(metavar="COMPARISON.yaml")],
    output: Output,
    runs: Runs = Path("runs"),
    accuracy: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Validation accuracy whose virtual hours are reported."
        ),
    ] = None,
) -> None:
    """Draw accuracy against virtual hours, and the participation of clients."""
    with interruptible(runs):
        plan = read_comparison(file)
        tables = write_hours(plan, runs / plan.name, output, accuracy)
    print_shown(Shown(tables))
    say(f"Numbers and pictures are in {output}")


@app.command()
def sizes(
    file: Annotated[Path, typer.Argument(metavar="COMPARISON.yaml")],
    output: Output,
    runs: Runs = Path("runs"),
) -> None:
    """Show virtual hours, bytes, and the accuracy of weak and strong clients."""
    with interruptible(runs):
        plan = read_comparison(file)
        table = write_sizes(plan, runs / plan.name, output)
    print_shown(Shown((table,)))
    say(f"The table is in {output / 'sizes.md'}")


@app.command()
def rounds(
    file: Annotated[Path, typer.Argument(metavar="COMPARISON.yaml")],
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A folder for each training.")
    ] = Path("runs/rounds"),
    every: Annotated[int, typer.Option(min=1, help="Rounds between readings.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW", help="Rows to train; default: all."),
    ] = None,
) -> None:
    """Train a comparison's rows and test them after rounds; resume unfinished ones."""
    plan = read_comparison(file, overrides or ())

    def say_round(figures: RoundRecord) -> None:
        say(f"round {figures['server_round']} in {figures['seconds']:.0f} s")

    with interruptible(output):
        read_rounds(plan, output, every, only or (), say_round)
    print_shown(shown(plan, output))
    say(f"All readings are in {output / 'readings.csv'}")


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        message = f"found {text!r}, expected KEY=VALUE"
        raise ConfigError([Problem("options", message)], "the figure")
    return key, parse_yaml(value, text)


app.command()(pfllib)

if __name__ == "__main__":
    app()
