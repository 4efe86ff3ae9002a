"""Why the server refused this client, or this client a run or a model.

A person looks for it later than it is logged, so that it is kept in the state folder.
"""

import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from knnper.config.errors import RunError
from knnper.durable_files import JsonLines
from knnper.private_folders import make_private

REFUSALS = "refusals.jsonl"
"""The file in the client's state folder."""

MOST = 100

REPEATED = timedelta(days=1)
"""Within it, the same refusal is noted once."""

_LOG = logging.getLogger(__name__)

About = Literal["client", "model", "run"]


@dataclass(frozen=True)
class RefusalNote:
    """One refusal.

    Attributes
    ----------
    time
        When, as ISO 8601 with a time zone.
    about
        Whether the server refused the client, or the client a model or a run.
    reason
        What was found, what was expected, how to mend it.
    """

    time: datetime
    about: About
    reason: str


_NOTE = TypeAdapter(RefusalNote)


def note_refusal(state: Path, about: About, reason: str) -> bool:
    """Write down that there was one now; the last `MOST` are kept.

    Returns whether it is a new one: what is asked again within a day is not written
    again, nor is it news that the server repeats why this client refused its run.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    last = _readable_last(state)
    if last is not None and last.time > now - REPEATED:
        same = (last.about, last.reason) == (about, reason)
        echo = (last.about, about) == ("run", "client") and last.reason[:100] in reason
        if same or echo:
            return False
    note = RefusalNote(now, about, reason)
    make_private(state)
    document = {**asdict(note), "time": note.time.isoformat()}
    notes = JsonLines(state / REFUSALS)
    notes.append(document)
    _keep_the_last(notes)
    return True


def _readable_last(state: Path) -> RefusalNote | None:
    try:
        return last_refusal(state)
    except RunError:
        return None


def _keep_the_last(notes: JsonLines) -> None:
    try:
        found = notes.read()
    except RunError as error:
        _LOG.warning("%s", error)
        return
    if len(found) > MOST:
        notes.replace(found[-MOST:])


def last_refusal(state: Path) -> RefusalNote | None:
    """Return the last one; None if there was none.

    Raises
    ------
    RunError
        If the file is damaged.
    """
    notes = JsonLines(state / REFUSALS).read()
    try:
        return _NOTE.validate_python(notes[-1]) if notes else None
    except ValidationError as error:
        raise RunError(
            f"the last line of {state / REFUSALS} is damaged; remove the file"
        ) from error
