"""Times, sizes, counts and names as text, and times from text."""

from collections.abc import Sequence
from datetime import UTC, datetime

import typer

MOST_NAMED = 10  # clients named in a line


def parse_time(text: str) -> float:
    """Parse an ISO 8601 time, by default in UTC, to seconds since 1970."""
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
    """Format seconds since 1970 as an ISO 8601 time in UTC, if it is in range."""
    if not 0 <= seconds < datetime.max.replace(tzinfo=UTC).timestamp():
        return f"{seconds:g} seconds since 1970"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def megabytes(num_bytes: float) -> str:
    """Format a size in megabytes (10^6 bytes)."""
    return f"{num_bytes / 1e6:.2f} MB"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 example, 2 examples."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(clients: Sequence[str]) -> str:
    """Join the first names with commas: a federation may have hundreds."""
    dots = ", ..." if len(clients) > MOST_NAMED else ""
    return ", ".join(clients[:MOST_NAMED]) + dots
