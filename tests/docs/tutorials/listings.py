"""The listings of a tutorial, in order: what its reader types, writes and sees."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./-]+)`:\n\n$")
_WRITTEN = ("markdown", "python", "yaml")


@dataclass(frozen=True)
class Commands:
    """Lines for the shell; ``output`` is what the page shows of theirs, or None."""

    line: int
    text: str
    output: str | None


@dataclass(frozen=True)
class NewFile:
    """A file that the reader saves."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Change:
    """Lines that begin with + or - in a file that is there; others are as they are."""

    line: int
    name: str
    text: str


Listing = Commands | NewFile | Change


def listings_of(page: Path) -> list[Listing]:
    """Return the listings of a page; an output belongs to the commands before it.

    Raises
    ------
    ValueError
        If a listing is none that can be run: its language is another one, a file
        has no name in the line before, or an output follows no commands.
    """
    text = page.read_text(encoding="utf-8")
    return list(_listings(text))


def _listings(text: str) -> Iterator[Listing]:
    waiting: Commands | None = None
    for match in _FENCED.finditer(text):
        language, content = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if language == "text":
            if waiting is None:
                raise ValueError(f"line {line}: an output follows no commands")
            yield Commands(waiting.line, waiting.text, content)
            waiting = None
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if language == "sh":
            waiting = Commands(line, content, None)
        else:
            yield _file(language, line, content, text[: match.start()])
    if waiting is not None:
        yield waiting


def _file(language: str, line: int, content: str, before: str) -> NewFile | Change:
    named = _NAMED.search(before)
    if named is None:
        raise ValueError(f"line {line}: the line before must end with a `file`:")
    if language == "diff":
        return Change(line, named[1], content)
    if language not in _WRITTEN:
        expected = ", ".join(("sh", "text", "diff", *_WRITTEN))
        raise ValueError(f"line {line}: expected one of {expected}, found {language}")
    return NewFile(line, named[1], content)
