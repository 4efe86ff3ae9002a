"""The files of a report."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib import rc_context

from knnper.config.errors import RunError
from knnper.durable_files import write_atomically
from simulation.figures.lettering import boxes_told
from simulation.reporting.sections import Section

FORMATS: Mapping[str, dict[str, None]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
"""Of the charts, for a paper; each with what leaves its date out."""


def write_text(path: Path, text: str) -> None:
    """Write a file; parents are created as needed.

    Raises
    ------
    RunError
        If that cannot be done.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


@boxes_told()
def write_figures(sections: Iterable[Section], folder: Path) -> list[Path]:
    """Write each chart as NAME.svg and NAME.pdf; return the files.

    Raises
    ------
    RunError
        If that cannot be done.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            if section.picture is None:
                continue
            for ending, undated in FORMATS.items():
                path = folder / f"{section.name}.{ending}"
                # Without a date and with named parts, the same chart is the same file.
                with rc_context({"svg.hashsalt": section.name}):
                    section.picture.figure.savefig(path, metadata=undated)
                written.append(path)
    except OSError as error:
        raise RunError(f"no figures can be written to {folder}: {error}") from error
    return written
