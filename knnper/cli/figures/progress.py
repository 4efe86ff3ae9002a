"""What tells how far a figure is."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from knnper.cli.output import say
from knnper.cli.progress import roughly

if TYPE_CHECKING:
    from simulation.figures.folder import OnPart

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
