"""The listings of a tutorial, run by a shell in a copy of the repository.

``python running.py FILE LISTING`` changes a file as a listing with + and - says.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.processes import Commands

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("python", "knnper", "ruff", "mypy", "pytest")
_LONGEST_S = 1200.0
_MARK = "=== listing"
_FAILED = "=== failed"
_REFUSED = "Error"
_LEFT_OUT = [
    ".git",
    ".venv",
    ".hypothesis",
    ".*_cache",
    "__pycache__",
    "runs",
    "stores",
]
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")
POINTS, SHARE = 5.0, 0.05
_ANYTHING = "…"


_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./-]+)`:\n\n$")
_SAVED = ("markdown", "python", "yaml")


@dataclass(frozen=True)
class Listing:
    """Lines for the shell (`sh`), a file that the reader saves, or its `diff`."""

    line: int
    language: str
    text: str
    file: str | None = None
    output: str | None = None  # what the page shows of what the shell writes


def listings_of(page: Path) -> list[Listing]:
    """Return the listings of a page; an output belongs to the commands before it.

    Raises
    ------
    ValueError
        If a listing is none that can be run: its language is another one, a file
        has no name in the line before, or an output follows no commands.
    """
    text, listings = page.read_text(encoding="utf-8"), list[Listing]()
    last = None
    for match in _FENCED.finditer(text):
        language, content = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        named = _NAMED.search(text[: match.start()])
        if language == "text":
            if last != "sh":
                raise ValueError(f"line {line}: an output follows no commands")
            listings[-1] = replace(listings[-1], output=content)
        elif language == "sh":
            listings.append(Listing(line, language, content))
        elif named is None:
            raise ValueError(f"line {line}: the line before must end with a `file`:")
        elif language in ("diff", *_SAVED):
            listings.append(Listing(line, language, content, named[1]))
        else:
            expected = ", ".join(("sh", "text", "diff", *_SAVED))
            raise ValueError(f"line {line}: expected {expected}, found {language}")
        last = language
    return listings


def fresh_clone(folder: Path) -> Path:
    """Return a copy of the repository as `make install` leaves it.

    Its environment leads to the one that runs the tests, but for the code.
    """
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    programs = write_programs(folder / ".venv/bin")
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (folder / ".venv/.installed").touch()
    return folder


def write_programs(folder: Path) -> Path:
    """Make a folder of programs, those of the environment that runs the tests."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        program = Path(sys.executable).with_name(name)
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_listings(
    listings: Sequence[Listing],
    clone: Path,
    commands: "Commands",
    installed: Path | None = None,
) -> list[str]:
    """Run the listings in one shell; return what differs from what they show.

    With what is ``installed`` there, the folder in which they run is no clone.
    """
    script = "\n".join(_script(listings, clone.with_name("listings")))
    file = clone.with_name("script.sh")
    file.write_text(script, encoding="utf-8")
    environment = {
        "PYTHONPATH": str(installed or clone),
        "KNNPER_CACHE": str(clone.with_name("cache")),
        "COLUMNS": "100",
    }
    if installed is not None:
        programs = write_programs(clone.with_name("bin"))
        environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    shell = ["bash", "-c", f"cd {shlex.quote(str(clone))} && source {file}"]
    running = commands.start("shell", shell, environment)
    running.wait(_LONGEST_S)
    written = dict(_sections(running.written))
    return [
        f"line {listing.line}: {problem}"
        for number, listing in enumerate(listings)
        if (problem := _problem(listing, written.get(number)))
    ]


def _script(listings: Sequence[Listing], staged: Path) -> Iterator[str]:
    yield f"trap 'echo \"{_FAILED}: $BASH_COMMAND\"' ERR"
    staged.mkdir()
    for number, listing in enumerate(listings):
        yield f"echo '{_MARK} {number}'"
        if listing.file is None:
            yield listing.text
            continue
        content, name = staged / str(number), shlex.quote(listing.file)
        content.write_text(listing.text, encoding="utf-8")
        if listing.language == "diff":
            yield f"{sys.executable} {__file__} {name} {content}"
        else:
            yield f'mkdir -p "$(dirname {name})" && cp {content} {name}'


def _sections(written: str) -> Iterator[tuple[int, str]]:
    """Yield what each listing wrote, by its number."""
    parts = re.split(rf"^{_MARK} (\d+)\n", written, flags=re.MULTILINE)[1:]
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        yield int(number), text


def _problem(listing: Listing, written: str | None) -> str | None:
    shown = listing.output
    if written is None:
        return "it was not reached"
    if _FAILED in written and not (shown and _REFUSED in shown):
        return f"a command failed:\n{written}"
    return None if shown is None else difference(shown, written)


def difference(shown: str, written: str) -> str | None:
    """Return how an output differs from what a page shows of it, or None.

    The lines that are shown must have been written, one after the other. Spaces count
    as one. A line of … stands for any lines, … within a line for anything. A number
    with a decimal point may depend on the machine: it may be `POINTS` larger or
    smaller, with three decimals or more only `SHARE`, or that part of itself.
    """
    numbers = NUMBER.findall(shown)
    matches = re.finditer(_pattern(shown), f"\n{_plain(written)}\n")
    matched = [match.groups() for match in matches]
    if not matched:
        return f"shown:\n{shown}\nwritten:\n{written}"
    if any(_near(numbers, candidate) for candidate in matched):
        return None
    return f"numbers shown: {numbers}\nwritten: {matched[0]}"


def _near(shown: Sequence[str], written: Sequence[str]) -> bool:
    return all(
        abs(float(number) - float(other)) <= _tolerance(number)
        for number, other in zip(shown, written, strict=True)
    )


def _tolerance(number: str) -> float:
    num_decimals = len(number.partition(".")[2])
    return max(SHARE if num_decimals > 2 else POINTS, SHARE * abs(float(number)))


def _plain(text: str) -> str:
    """Return the text without differences that cannot be seen."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(lines)


def _pattern(shown: str) -> str:
    parts = []
    for line in _plain(shown).splitlines():
        if line == _ANYTHING:
            parts.append(r"(?:\n.*)*?")
        else:
            pieces = map(_numbers_open, re.split(f" ?{_ANYTHING} ?", line))
            parts.append(r"\n" + ".*?".join(pieces))
    return "".join(parts) + r"(?=\n)"


def _numbers_open(piece: str) -> str:
    """Return a pattern in which every number with a decimal point is a group."""
    fixed = (re.escape(part) for part in NUMBER.split(piece))
    return r"(-?\d+\.\d+)".join(fixed)


def changed(text: str, change: str) -> str:
    """Return ``text`` with a change made in the one place where it fits.

    Raises
    ------
    ValueError
        If the lines that should be there are not, or are in several places.
    """
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
    after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
    places = [
        match.start()
        for match in re.finditer("^", text, re.MULTILINE)
        if text.startswith(before, match.start())
    ]
    if len(places) != 1:
        raise ValueError(
            f"expected these lines once, found them {len(places)} times:\n{before}"
        )
    return text[: places[0]] + after + text[places[0] + len(before) :]


if __name__ == "__main__":
    file, listing = map(Path, sys.argv[1:])
    file.write_text(changed(file.read_text(), listing.read_text()))
