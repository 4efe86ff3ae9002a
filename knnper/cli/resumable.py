"""Progress of work that goes on with the same command after an interruption."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from knnper.cli.errors import INTERRUPTED
from knnper.cli.output import say


@contextlib.contextmanager
def counting(
    total: int, noun: str, folder: Path
) -> Iterator[Callable[[int, bool], None]]:
    """Yield a function that is told how many more parts are done.

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

    try:
        with run_counter(total, noun) as advance:
            yield advance
    except KeyboardInterrupt as error:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        say(f"Interrupted; what is done is in {folder}. To go on: {command}")
        raise typer.Exit(INTERRUPTED) from error
