"""Progress of work that goes on with the same command after an interruption."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from knnper.cli.errors import INTERRUPTED
from knnper.cli.output import say
from knnper.cli.typed import typed_command

if TYPE_CHECKING:
    from simulation.batch.progress import Advance


@contextlib.contextmanager
def counting(total: int, noun: str, folder: Path) -> "Iterator[Advance]":
    """Yield a function that is told how far the work is.

    Parameters
    ----------
    total
        Parts in all.
    noun
        What they are called.
    folder
        Holds what is done when the user interrupts.
    """
    # It loads rich's bars, which `knnper --help` need not wait for.
    from knnper.cli.progress import run_counter

    with interruptible(folder), run_counter(total, noun) as advance:
        yield advance


@contextlib.contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Say how to go on where the user interrupts what is done inside the block.

    Parameters
    ----------
    folder
        Holds what is done.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        command = shlex.join(typed_command())
        done = "nothing is done yet"
        if _has_results(folder):
            done = f"what is done is in {folder}"
        say(f"Interrupted; {done}. To go on: {command}")
        raise typer.Exit(INTERRUPTED) from error


def _has_results(folder: Path) -> bool:
    """Return whether anything below ``folder`` need not be done again."""
    # As below: it need not be loaded where nobody interrupts.
    from simulation.result_files import RESULT_FILES

    return any(next(folder.rglob(name), None) for name in RESULT_FILES)


def how_to_go_on(command: str, run: Path) -> str:
    """Return what to do with a run that ended before its results.

    Parameters
    ----------
    command
        Of ``knnper``; it takes ``--resume``.
    run
        The run's folder.
    """
    # It loads torch, which `knnper --help` need not wait for.
    from server.checkpoint import rounds_in
    from server.run_folder import RunFolder

    resume = f"knnper {command} --resume {run}"
    *older, latest = rounds_in(RunFolder(run).checkpoints) or [0]
    if latest:
        back = f", or with --from-round N from round {_or(older)}" if older else ""
        return f"To go on from the last checkpoint, of round {latest}: {resume}{back}"
    return f"There is no checkpoint yet. To begin again: {resume}"


def _or(rounds: Sequence[int]) -> str:
    *others, last = map(str, rounds)
    return f"{', '.join(others)} or {last}" if others else last
