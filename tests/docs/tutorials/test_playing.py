"""What can go wrong while a page is run is told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.tutorials.listings import Change, Commands, Listing, NewFile
from tests.docs.tutorials.playing import play
from tests.federation import running_commands


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[running_commands.Commands]:
    with running_commands.Commands(tmp_path / "logs") as started:
        yield started


@pytest.mark.parametrize(
    ("listings", "problem"),
    [
        ([Commands(3, "kept=1\n", None), Commands(7, "echo $kept\n", "1\n")], None),
        ([NewFile(1, "a/b.yaml", "x\n"), Commands(5, "cat a/b.yaml\n", "x\n")], None),
        ([Commands(3, "echo one\n", "two\n")], "line 3: shown:\ntwo"),
        ([Commands(3, "false\ntrue\n", None)], "line 3: a command failed:.*false"),
        ([Commands(3, "exit\n", None), Commands(5, "ls\n", "")], "line 5: it was not"),
        ([Change(3, "none.py", "-a\n")], "line 3: a command failed"),
        ([Commands(3, "echo Error; false\n", "Error\n")], None),
    ],
)
def test_problems_are_told(
    tmp_path: Path,
    commands: running_commands.Commands,
    listings: list[Listing],
    problem: str | None,
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    found = "\n".join(play(listings, clone, commands))
    if problem is None:
        assert not found
    else:
        assert problem.split(".*")[0] in found
        assert problem.split(".*")[-1] in found
