"""A tutorial played by a shell in a copy of the repository."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.docs.tutorials import changing
from tests.docs.tutorials.comparing import difference
from tests.docs.tutorials.listings import Commands, Listing, NewFile
from tests.federation import running_commands

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("python", "knnper", "ruff", "mypy", "pytest")
_LONGEST_S = 1200.0
_MARK = "=== listing"
_FAILED = "=== failed"
_REFUSED = "Error"
_LEFT_OUT = (
    ".git",
    ".venv",
    ".hypothesis",
    ".*_cache",
    "__pycache__",
    "runs",
    "stores",
)


def fresh_clone(folder: Path) -> Path:
    """Return a copy of the repository as `make install` leaves it.

    Its environment leads to the one that runs the tests, but for the code.
    """
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        program = Path(sys.executable).with_name(name)
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (folder / ".venv/.installed").touch()
    return folder


def play(
    listings: Sequence[Listing], clone: Path, commands: running_commands.Commands
) -> list[str]:
    """Play the listings in one shell; return what differs from what they show."""
    script = "\n".join(_script(listings, clone.with_name("listings")))
    file = clone.with_name("script.sh")
    file.write_text(script, encoding="utf-8")
    environment = {
        "PYTHONPATH": str(clone),
        "KNNPER_CACHE": str(clone.with_name("cache")),
        "COLUMNS": "100",
    }
    shell = ["bash", "-c", f"cd {shlex.quote(str(clone))} && source {file}"]
    running = commands.start("shell", shell, environment)
    running.wait(_LONGEST_S)
    written = dict(_sections(running.written))
    return [
        f"line {one.line}: {problem}"
        for number, one in enumerate(listings)
        if (problem := _problem(one, written.get(number)))
    ]


def _script(listings: Sequence[Listing], staged: Path) -> Iterator[str]:
    yield f"trap 'echo \"{_FAILED}: $BASH_COMMAND\"' ERR"
    staged.mkdir()
    for number, one in enumerate(listings):
        yield f"echo '{_MARK} {number}'"
        if isinstance(one, Commands):
            yield one.text
            continue
        content, name = staged / str(number), shlex.quote(one.name)
        content.write_text(one.text, encoding="utf-8")
        if isinstance(one, NewFile):
            yield f'mkdir -p "$(dirname {name})" && cp {content} {name}'
        else:
            yield f"{sys.executable} {changing.__file__} {name} {content}"


def _sections(written: str) -> Iterator[tuple[int, str]]:
    """Yield what each listing wrote, by its number."""
    parts = re.split(rf"^{_MARK} (\d+)\n", written, flags=re.MULTILINE)[1:]
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        yield int(number), text


def _problem(listing: Listing, written: str | None) -> str | None:
    if written is None:
        return "it was not reached"
    shown = listing.output if isinstance(listing, Commands) else None
    if _FAILED in written and not (shown and _REFUSED in shown):
        return f"a command failed:\n{written}"
    return None if shown is None else difference(shown, written)
