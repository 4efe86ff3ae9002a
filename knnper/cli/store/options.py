"""Arguments and options that several of the commands take."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

StoreFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The store's folder.")
]
ModelRun = Annotated[
    Path,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Folder of the finished run, or of the exported model, that embeds.",
    ),
]
OptionalRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Folder of the finished run, or of the exported model, that embeds.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, as in --set 'index={name: sq8, rerank: 4}'; may be "
        "repeated.",
    ),
]


def seconds_of(text: str) -> float:
    """Return an ISO 8601 time, in UTC where it says nothing else, as seconds.

    Raises
    ------
    BadParameter
        If it is none.
    """
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
