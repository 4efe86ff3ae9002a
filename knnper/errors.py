"""Errors, and how text from elsewhere is made safe to log and to print."""

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class KnnPerError(Exception):
    """Base of every error that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an error that comes from another process is made by calling its
        # class with the text, which not all take for their argument.
        return _rebuilt, (type(self), self.args), vars(self)


def _rebuilt(kind: type[KnnPerError], arguments: tuple[Any, ...]) -> KnnPerError:
    return kind.__new__(kind, *arguments)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a configuration."""

    place: str  # dotted path of the setting, as in ``training.num_rounds``
    message: str  # what was found, what was expected, how to mend it

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(KnnPerError):
    """An experiment is described wrongly; carries *all* problems that were found."""

    def __init__(self, problems: Sequence[Problem], source: str = "experiment") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} {noun} in {source}:\n{lines}")


class DataError(KnnPerError):
    """A data set is missing, unreadable or not laid out as expected."""


class OwnCodeError(KnnPerError):
    """What a user brought, as ``module:attribute``, is not there, wrong, or failed.

    ``place`` says in which line a failure was, and of what type, and nothing of what
    may be data; empty for another error.
    """

    place = ""


class RunError(KnnPerError):
    """A run cannot start or cannot go on."""


class RefusedError(RunError):
    """A site does not do what it is asked for; the text is meant for both sides."""


class FolderTakenError(RunError):
    """A folder holds something else than what is to be written there."""


class TrainingDivergedError(KnnPerError):
    """A client's training ended with numbers that are not finite."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged or belongs to another experiment."""


class CredentialError(KnnPerError):
    """A certificate or a key is missing, unreadable or of another kind."""


class CodecError(KnnPerError):
    """Something cannot be encoded, or what arrived is not what was expected."""


MOST_CHARACTERS = 500
MOST_LOGGED = 20_000

# All that steers a terminal, or turns the direction of a line round; not the ends of
# lines and tabs.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_CUT = " ... "

# Of a traceback, the end says what is wrong.
_FROM_THE_START = 150


def printable(text: str) -> str:
    """Return ``text`` as one line of at most `MOST_CHARACTERS` characters."""
    if len(text) > MOST_CHARACTERS:
        text = _shortened(text)
    if not text.isprintable():
        text = "".join(one if one.isprintable() else _escaped(one) for one in text)
    return _shortened(text) if len(text) > MOST_CHARACTERS else text


def harmless(text: str) -> str:
    """Return ``text``, of any number of lines, with what steers a terminal escaped."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class HarmlessFormatter(logging.Formatter):
    """Writes records of which no part can pass for another record.

    All lines of one but the first are indented, and what steers a terminal is escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        text = super().format(record)
        if len(text) > MOST_LOGGED:
            text = f"{text[:MOST_LOGGED]}{_CUT}"
        return harmless(text).replace("\n", "\n    ")


def write_harmlessly(layout: str) -> None:
    """Let this process log to standard error, from INFO on, harmlessly."""
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter(layout))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


@functools.lru_cache(maxsize=1024)
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning, which a process that opens the same data again does not repeat."""
    logger.warning("%s", text)


def _shortened(text: str) -> str:
    to_the_end = MOST_CHARACTERS - _FROM_THE_START - len(_CUT)
    return text[:_FROM_THE_START] + _CUT + text[-to_the_end:]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
