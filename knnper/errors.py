"""Errors, and how text from elsewhere is made safe to log and to print."""

import builtins
import errno
import functools
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from knnper.reasons import Code, SafeReason, Word

_EXCEPTIONS = frozenset(
    value
    for value in vars(builtins).values()
    if isinstance(value, type) and issubclass(value, Exception)
)
_MOST_CAUSES = 20
MOST_CHARACTERS = 500
MOST_LOGGED = 20_000

# Characters that control a terminal or reverse the direction of text, except line ends
# and tabs.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CUT = " ... "

# Characters kept from the start of a long text; the end of a traceback matters more.
_FROM_THE_START = 150


class KnnPerError(Exception):
    """Base of every error that this project raises on purpose.

    Attributes
    ----------
    reasons
        What may be sent to another machine, see `reasons_of`. The text may hold data
        and names of files, and stays on this machine.
    """

    reasons: tuple[SafeReason, ...] = ()

    def __init__(self, *parts: object, reason: SafeReason | None = None) -> None:
        super().__init__(*parts)
        if reason is not None:
            self.reasons = (reason,)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an error that comes from another process is made by calling its
        # class with the text, which not all take for their argument.
        return _rebuilt, (type(self), self.args), vars(self)


def _rebuilt(kind: type[KnnPerError], arguments: tuple[Any, ...]) -> KnnPerError:
    return kind.__new__(kind, *arguments)


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    place: str  # dotted path of the setting, as in ``training.num_rounds``
    message: str  # what was found, what was expected, how to fix it
    reasons: tuple[SafeReason, ...] = ()  # of the underlying error, see `KnnPerError`

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(KnnPerError):
    """An experiment's description is invalid; lists *all* problems."""

    reasons: tuple[SafeReason, ...] = (SafeReason(Code.WRONG_SETTINGS),)

    def __init__(self, problems: Sequence[Problem], source: str = "experiment") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} {noun} in {source}:\n{lines}")
        if reasons := tuple(
            reason for problem in problems for reason in problem.reasons
        ):
            self.reasons = reasons


class DataError(KnnPerError):
    """A data set is missing, unreadable or not laid out as expected."""

    reasons = (SafeReason(Code.UNREADABLE_DATA),)


class OwnCodeError(KnnPerError):
    """Code of a user, ``module:attribute``, is missing, unsuitable, or failed."""

    reasons = (SafeReason(Code.OWN_CODE),)


class RunError(KnnPerError):
    """A run cannot start or continue."""


class RefusedError(RunError):
    """A site's settings do not allow a request; both sides get the reasons."""

    def __init__(self, reasons: Sequence[SafeReason]) -> None:
        super().__init__(_refusal(reasons))
        self.reasons = tuple(reasons)


class FolderTakenError(RunError):
    """A folder holds something else than what is to be written there."""


class TrainingDivergedError(KnnPerError):
    """A client's training ended with numbers that are not finite."""

    reasons = (SafeReason(Code.DIVERGED),)


class CheckpointError(RunError):
    """A checkpoint is missing, damaged or belongs to another experiment."""


class CredentialError(KnnPerError):
    """A certificate or a key is missing, unreadable or of another kind."""


class CodecError(KnnPerError):
    """Something cannot be encoded, or what arrived is not what was expected."""

    reasons = (SafeReason(Code.BAD_REQUEST),)


def kind_of(error: Exception) -> Word:
    """Return the name of the closest of Python's own classes that an error is of."""
    # The name of another class may hold data.
    names = [kind.__name__ for kind in type(error).__mro__ if kind in _EXCEPTIONS]
    return Word(names[0], {kind.__name__ for kind in _EXCEPTIONS})


def reasons_of(error: Exception) -> tuple[SafeReason, ...]:
    """Return the reasons of an error for another machine, without any of its text.

    They are those of the error or, where it has none of its own, of its cause.
    """
    chain = list(itertools.islice(_with_causes(error), _MOST_CAUSES))
    known = [link for link in chain if isinstance(link, KnnPerError)]
    stated = [link.reasons for link in known if "reasons" in vars(link)]
    by_class = [
        class_reasons for link in chain if (class_reasons := _reasons_by_class(link))
    ]
    # Users' code may raise our errors with something else in `reasons`.
    for reasons in (*stated, *by_class):
        if reasons and all(type(reason) is SafeReason for reason in reasons):
            return tuple(reasons)
    if isinstance(error, KnnPerError):
        return (SafeReason(Code.CANNOT_RUN),)
    return (SafeReason(Code.INTERNAL_ERROR, error=kind_of(error)),)


def text_for_others(error: Exception) -> str:
    """Return the `reasons_of` an error as text."""
    reasons = reasons_of(error)
    if isinstance(error, RefusedError):
        return _refusal(reasons)
    return f"{_joined(reasons)}; the client's own log has the details"


def _refusal(reasons: Sequence[SafeReason]) -> str:
    return f"the site's own settings do not allow it: {_joined(reasons)}"


def _joined(reasons: Sequence[SafeReason]) -> str:
    return "; ".join(dict.fromkeys(map(str, reasons)))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _reasons_by_class(error: BaseException) -> tuple[SafeReason, ...]:
    if isinstance(error, KnnPerError):
        return type(error).reasons
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (SafeReason(Code.OUT_OF_MEMORY),)
    if isinstance(error, OSError) and error.errno is not None:
        known = errno.errorcode.values()
        if (name := errno.errorcode.get(error.errno)) is not None:
            return (SafeReason(Code.FILE_SYSTEM, error=Word(name, known)),)
    return ()


def printable(text: str) -> str:
    """Return ``text`` as one line of at most `MOST_CHARACTERS` characters."""
    if len(text) > MOST_CHARACTERS:
        text = _shortened(text)
    if not text.isprintable():
        text = "".join(
            character if character.isprintable() else _escaped(character)
            for character in text
        )
    return _shortened(text) if len(text) > MOST_CHARACTERS else text


def harmless(text: str) -> str:
    """Return ``text``, of any lines, with terminal control characters escaped."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class HarmlessFormatter(logging.Formatter):
    """Formats records so that no part of one can pass for another record.

    All lines of a record but the first are indented, and terminal control characters
    are escaped.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
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
