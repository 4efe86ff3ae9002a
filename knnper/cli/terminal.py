"""What commands have in common: options, tables, progress, errors, exit codes."""

import contextlib
import errno
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from knnper.cli.plain_text import in_encoding_of, is_unicode, use_plain_text
from knnper.errors import ConfigError, FolderTakenError, KnnPerError, harmless
from knnper.server.observer import SECONDS_BETWEEN_LINES, bars
from knnper.simulation.experiments import find_experiment

# What loads torch is imported inside the functions: `knnper --help` need not wait.
if TYPE_CHECKING:
    from knnper.simulation.batches.progress import Advance
    from knnper.simulation.batches.progress import Progress as BatchProgress
    from knnper.simulation.reports.table import Shown

# The installed module with `server_app` and `client_app`; importing it loads torch.
APPS = "knnper.cli.flower_apps"
CLIENT_APP = f"{APPS}:client_app"

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Log every message of Flower's, too.")
]
ClientFile = Annotated[
    Path, typer.Argument(metavar="CLIENT.yaml", help="The client's file.")
]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder.")
]
FromRound = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --resume: go back to the checkpoint of round N; what came later is "
        "put aside.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the run that is in the folder.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write JSON to standard output, nothing else.")
]

# Standard output may be read by a program or go to a file: no line is cut there.
_FILE_WIDTH = 200
_UNLIMITED_WIDTH = 10_000
RUN_FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_FREE_SPACE = "free space, then give the same command again"
_A_FOLDER = "expected a folder there; choose another path"
_ALLOWED = "expected to be allowed; change its permissions or choose another path"
_ADVICE: Mapping[int | None, str] = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EEXIST: _A_FOLDER,
    errno.ENOTDIR: _A_FOLDER,
    errno.EACCES: _ALLOWED,
    errno.EPERM: _ALLOWED,
    errno.EROFS: _ALLOWED,
    errno.ENOENT: "expected it to be there; check the path or choose another",
}
_SECONDS_WITHOUT_NEWS = 60.0
_MINUTES_WITHOUT_SECONDS = 10
MOST_NAMED = 10  # clients in a line


def file_argument(metavar: str, what: str) -> Any:
    """Return the argument that is a file, or the name of what is shipped."""
    return typer.Argument(
        metavar=metavar,
        help=f"The {what}'s file, or a name that `knnper list experiments` shows.",
        callback=lambda path: path and find_experiment(path),
    )


ExperimentFile = Annotated[Path, file_argument("EXPERIMENT.yaml", "experiment")]


def set_option(example: str) -> Any:
    """Return the option ``--set``, with what may be set as the example."""
    return typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"Change a setting, as in --set {example}; may be repeated.",
    )


Overrides = Annotated[list[str] | None, set_option("training.num_rounds=50")]


OptionalExperimentFile = Annotated[
    Path | None, file_argument("EXPERIMENT.yaml", "experiment")
]


def require_start(
    experiment: Path | None,
    resume: Path | None,
    from_round: int | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Refuse options of a run that begins together with those of one that goes on."""
    if (experiment is None) == (resume is None):
        raise typer.BadParameter("give either EXPERIMENT.yaml or --resume DIR")
    if resume is None and from_round is not None:
        raise typer.BadParameter("--from-round goes with --resume DIR")
    if resume is not None and (output is not None or overwrite):
        raise typer.BadParameter("--resume goes with neither --output, --overwrite")


def print_json(document: Any) -> None:
    """Write plain values as JSON to standard output."""
    # Other characters are escaped where they cannot be written: it stays the same JSON.
    ascii_only = not is_unicode(sys.stdout)
    # JSON leaves some of what steers a terminal as it is.
    tell(json.dumps(document, indent=2, ensure_ascii=ascii_only))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    table = _table(header, rows)
    unlimited = console.options.update(max_width=_UNLIMITED_WIDTH)
    if console.measure(table, options=unlimited).maximum > console.width:
        # Without lines between columns. Cells take several lines where that does not
        # do, but for the names, unless they are most of the width.
        table = _table(header, rows, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        names = max((len(row[0]) for row in rows), default=0)
        table.columns[0].no_wrap = names <= console.width // 2
    console.print(table)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], **options: Any
) -> Table:
    table = Table(**options)
    for name in header:
        table.add_column(_cell(name), overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> str:
    """Return a text as rich takes it for what it says, and no terminal for more."""
    # Before layout, so that columns are as wide as the characters written.
    return escape(in_encoding_of(sys.stdout, harmless(text)))


def print_shown(shown: "Shown", document: Any = None) -> None:
    """Write the tables, or in their place plain values as JSON; remarks in any case."""
    if document is not None:
        print_json(document)
    else:
        for table in shown.tables:
            say(table.title)
            print_table(table.header, table.rows)
    for remark in shown.remarks:
        say(remark)


def show_run(folder: Path) -> None:
    """Write the figures of a finished run."""
    from knnper.simulation.reports.accuracy_table import tables_of_run
    from knnper.simulation.reports.verdict import verdict_of_run

    for sentence in verdict_of_run(folder):
        tell(sentence)
    for header, *rows in tables_of_run(folder):
        print_table(header, rows)
    say(f"Everything about this run is in {folder}")


def say(message: str) -> None:
    """Write a line for people to standard error."""
    # Named explicitly: click writes UTF-8 to a stream that it takes for ASCII.
    typer.echo(harmless(message), file=sys.stderr)


def tell(message: str = "", *, nl: bool = True) -> None:
    """Write a line for people to standard output."""
    typer.echo(harmless(message), file=sys.stdout, nl=nl)


class ErrorReportingGroup(TyperGroup):
    """Commands whose expected errors are a message, never a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command that the arguments name."""
        use_plain_text()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ConfigError, FolderTakenError) as error:
            say(f"Error: {error}")
            raise typer.Exit(WRONG_USAGE) from error
        except KnnPerError as error:
            say(f"Error: {error}")
            raise typer.Exit(RUN_FAILED) from error
        except BrokenPipeError:
            # Who reads the output has enough of it; click ends in silence then.
            raise
        except OSError as error:
            say(f"Error: {system_error(error)}")
            raise typer.Exit(RUN_FAILED) from error
        except KeyboardInterrupt as error:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from error


def system_error(error: OSError) -> str:
    """Return what is wrong with which path, and how to mend it."""
    reason = error.strerror or str(error) or type(error).__name__
    where = "" if error.filename is None else f"{error.filename}: "
    advice = _ADVICE.get(error.errno)
    return f"{where}{reason}; {advice}" if advice else f"{where}{reason}"


@contextlib.contextmanager
def run_counter(total: int, noun: str = "runs") -> Iterator["Advance"]:
    """Yield a function that is told how far a batch of ``total`` runs is."""
    with bars(TextColumn("{task.fields[left]}")) as progress:
        if progress is None:
            yield line_counter(total, say, noun=noun)
            return
        task = progress.add_task(noun, total=total, left="")

        def advance(now: "BatchProgress") -> None:
            left = time_left(now)
            progress.update(task, completed=now.done, total=now.total, left=left)

        yield advance


def time_left(now: "BatchProgress") -> str:
    """Return the time that is left in words; empty if unknown, and in the end."""
    if now.seconds_left is None or now.done >= now.total:
        return ""
    return f"some {roughly(now.seconds_left)} left"


def roughly(seconds: float) -> str:
    """Return a time as exactly as it can be known: to a minute, or to 10 s."""
    minutes, rest = divmod(10 * max(round(seconds / 10), 1), 60)
    if minutes >= _MINUTES_WITHOUT_SECONDS:
        return f"{round(seconds / 60)} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def line_counter(
    total: int,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    noun: str = "runs",
) -> "Advance":
    """Return a counter that writes a line now and then; see `run_counter`."""
    last_line, last_done = clock(), 0
    write(f"{total} {noun}")

    def advance(now: "BatchProgress") -> None:
        nonlocal last_line, last_done
        line = f"{now.done}/{now.total} {noun}"
        waited = clock() - last_line
        if now.done == now.at_start > last_done:
            write(f"{line} are there")
        elif (
            now.done == now.total > last_done
            or (now.done > last_done and waited >= SECONDS_BETWEEN_LINES)
            or waited >= _SECONDS_WITHOUT_NEWS
        ):
            write(f"{line} {time_left(now)}".rstrip())
        else:
            return
        last_line, last_done = clock(), now.done

    return advance


class Counter:
    """Draws a bar, or writes a line now and then with the time that is left."""

    def __init__(
        self,
        what: str,
        progress: Progress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._progress, self._clock = what, progress, clock
        if progress is not None:
            self._bar = progress.add_task(what, total=None)
        self._began = self._last_line = clock()
        self.num_done = self._total = 0

    def start(self, total: int) -> None:
        """Say how many there are."""
        self._total = total
        self._began = self._last_line = self._clock()
        if self._progress is not None:
            self._progress.update(self._bar, total=total)

    def advance(self, count: int) -> None:
        """Say that so many more are done."""
        self.num_done += count
        if self._progress is not None:
            self._progress.advance(self._bar, count)
        elif self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            per_one = (self._clock() - self._began) / self.num_done
            left = per_one * (self._total - self.num_done)
            say(f"{self._what}: {self.num_done}/{self._total}, {left:.0f} s left")


@contextlib.contextmanager
def counter(what: str, *, is_kept: bool = False) -> Iterator[Counter]:
    """Yield a counter that draws on a terminal, and writes lines elsewhere."""
    with bars(TimeRemainingColumn()) as progress:
        counting = Counter(what, progress)
        try:
            yield counting
        except KeyboardInterrupt:
            if is_kept and counting.num_done:
                say("What was counted is kept; give the same command again to go on.")
            raise


def seconds_of(text: str) -> float:
    """Return an ISO 8601 time, in UTC where it says nothing else, as seconds."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"found {text!r}, expected a time such as 2026-03-31 or "
            "2026-03-31T09:30:00+02:00"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def as_time(seconds: float) -> str:
    """Return seconds since 1970 as an ISO 8601 time in UTC, if they are one."""
    if not 0 <= seconds < datetime.max.replace(tzinfo=UTC).timestamp():
        return f"{seconds:g} seconds since 1970"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def megabytes(num_bytes: float) -> str:
    """Return a size in megabytes (10^6 bytes) as people read it."""
    return f"{num_bytes / 1e6:.2f} MB"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: 1 example, 2 examples."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(clients: Sequence[str]) -> str:
    """Return the first names, separated by commas: a federation may have hundreds."""
    more = ", ..." if len(clients) > MOST_NAMED else ""
    return ", ".join(clients[:MOST_NAMED]) + more


def typed_command() -> list[str]:
    """Return the command and its arguments, the program by its name alone."""
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py"
    name = ["python", "-m", program.parent.name] if is_module else [program.name]
    return [*name, *sys.argv[1:]]


@contextlib.contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Say how to go on where the user interrupts what is done inside the block."""
    try:
        yield
    except KeyboardInterrupt as error:
        command = shlex.join(typed_command())
        from knnper.simulation.reports.finished_run import RESULT_FILES

        has_results = any(next(folder.rglob(name), None) for name in RESULT_FILES)
        done = f"what is done is in {folder}" if has_results else "nothing is done yet"
        say(f"Interrupted; {done}. To go on: {command}")
        raise typer.Exit(INTERRUPTED) from error


def how_to_resume(command: str, run: Path) -> str:
    """Return what to do with a run that ended before its results; "" without one."""
    from knnper.server.checkpoints import rounds_in
    from knnper.server.run_folder import RunFolder, is_run

    if not is_run(run):
        return ""
    resume = f"knnper {command} --resume {run}"
    *older, latest = rounds_in(RunFolder(run).checkpoints) or [0]
    if latest:
        *others, last = map(str, older or [0])
        rounds = f"{', '.join(others)} or {last}" if others else last
        back = f", or with --from-round N from round {rounds}" if older else ""
        return f"To go on from the last checkpoint, of round {latest}: {resume}{back}"
    return f"There is no checkpoint yet. To begin again: {resume}"
