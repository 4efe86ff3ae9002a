"""Why a file was not played to its end, and where in the code that was."""

import traceback
from pathlib import Path

from knnper.config.errors import KnnPerError
from knnper.durable_files import write_atomically
from simulation.reproducing.protocols import ERRORS

_EXPECTED = (KnnPerError, OSError)
"""Their messages say all that there is to say."""


def reason_of(error: Exception, name: str, output: Path) -> str:
    """Return why a file failed; keep the traceback of what nobody expected.

    Parameters
    ----------
    error
        What ended it.
    name
        The file's.
    output
        Holds the files' folders.
    """
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    place = _place(name, output)
    place.parent.mkdir(exist_ok=True)
    write_atomically(place, "".join(traceback.format_exception(error)))
    kind = type(error).__name__
    return f"{kind}: {error}. Where in the code that was stands in {place}"


def forget(name: str, output: Path) -> None:
    """Remove the traceback of an earlier time."""
    _place(name, output).unlink(missing_ok=True)


def _place(name: str, output: Path) -> Path:
    # A folder of its own with a traceback in it would be taken for something else.
    return output / ERRORS / f"{name}.txt"
