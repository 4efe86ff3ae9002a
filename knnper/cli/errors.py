"""Errors of commands as messages with exit codes, and how to resume."""

import contextlib
import errno
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import typer
from typer.core import TyperGroup

from knnper.cli.plain_text import use_plain_text
from knnper.cli.terminal import say
from knnper.errors import ConfigError, FolderTakenError, KnnPerError

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
    errno.ENOENT: "expected it to exist; check the path or choose another",
}


class ErrorReportingGroup(TyperGroup):
    """A group of commands that shows expected errors as messages, not tracebacks."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line, with plain characters where the terminal needs them."""
        use_plain_text()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; turn its errors into messages and exit codes."""
        try:
            return super().invoke(ctx)
        except (ConfigError, FolderTakenError) as error:
            say(f"Error: {error}")
            raise typer.Exit(WRONG_USAGE) from error
        except KnnPerError as error:
            say(f"Error: {error}")
            raise typer.Exit(RUN_FAILED) from error
        except BrokenPipeError:
            # The reader of a pipe has closed it; click then exits silently.
            raise
        except OSError as error:
            say(f"Error: {system_error(error)}")
            raise typer.Exit(RUN_FAILED) from error
        except KeyboardInterrupt as error:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from error


def system_error(error: OSError) -> str:
    """Return the reason, the path and a fix of a system error."""
    reason = error.strerror or str(error) or type(error).__name__
    where = "" if error.filename is None else f"{error.filename}: "
    advice = _ADVICE.get(error.errno)
    return f"{where}{reason}; {advice}" if advice else f"{where}{reason}"


def typed_command() -> list[str]:
    """Return the command line, with the program's name instead of its path."""
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py"
    name = ["python", "-m", program.parent.name] if is_module else [program.name]
    return [*name, *sys.argv[1:]]


@contextlib.contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """On Ctrl-C inside the block, show how to continue and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        command = shlex.join(typed_command())
        from knnper.simulation.reports.finished_run import RESULT_FILES

        has_results = any(next(folder.rglob(name), None) for name in RESULT_FILES)
        done = f"results so far are in {folder}" if has_results else "no results yet"
        say(f"Interrupted; {done}. To continue: {command}")
        raise typer.Exit(INTERRUPTED) from error


def how_to_resume(command: str, run: Path) -> str:
    """Return how to resume a run without results; empty if there is no run."""
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
        return f"To resume from the last checkpoint, of round {latest}: {resume}{back}"
    return f"There is no checkpoint yet. To begin again: {resume}"
