"""Errors that say what was found, what was expected and how to mend it."""

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
    """One thing that is wrong in a configuration.

    Attributes
    ----------
    place
        Dotted path of the setting, as in ``training.num_rounds``.
    message
        What was found, what was expected, how to mend it.
    """

    place: str
    message: str

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
