"""Every tutorial does what it says: in an empty folder, or from a fresh clone on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.tutorials.running import (
    ROOT,
    changed,
    fresh_clone,
    listings_of,
    run_listings,
)
from tests.processes import Commands

FOLDER = ROOT / "docs/tutorials"
# One after the other, where a page goes on from what another one left.
WITH_THE_PACKAGE = (
    ("first_simulation",),
    ("own_data",),
    ("read_a_report",),
    ("run_a_sweep",),
    ("own_method",),
    ("own_model",),
    ("deploy", "onboard"),
)
IN_A_CLONE = (("../adding_a_method",), ("../adding_a_dataset",))
TUTORIALS = [
    *sorted(FOLDER.glob("*.md")),
    *(FOLDER / f"{name}.md" for (name,) in IN_A_CLONE),
]


def test_every_page_is_listed_and_run() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    run = [name for many in WITH_THE_PACKAGE for name in many]
    assert sorted(run) == sorted(pages)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    with_package, in_a_clone = text.split("## In a clone")
    for part, expected in ((with_package, WITH_THE_PACKAGE), (in_a_clone, IN_A_CLONE)):
        listed = set(re.findall(r"\(((?:\.\./)?\w+)\.md\)", part))
        assert listed == {name for many in expected for name in many}


def test_no_page_but_those_of_a_clone_names_the_repository() -> None:
    for name in (name for many in WITH_THE_PACKAGE for name in many):
        for one in listings_of(FOLDER / f"{name}.md"):
            assert not re.search(r"\bmake \w|\bmake$|git |papers|tests/", one.text), (
                name
            )


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_its_programs_pass_the_checks(page: Path) -> None:
    # Of modules that the reader writes the order of imports is not known here, and
    # who tries something out may print.
    # What is no part of the repository need not say what it is, and may assert.
    also = "" if page.parent != FOLDER else ",D,S101,ARG002"
    check = ["check", "--ignore", f"I001,T201{also}"]
    for one in listings_of(page):
        if one.language == "python":
            for what in (check, ["format", "--check"]):
                command = [sys.executable, "-m", "ruff", *what, "--stdin-filename"]
                found = subprocess.run(
                    [*command, str(one.file), "-"],
                    input=one.text,
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=ROOT,
                )
                assert found.returncode == 0, f"{one.file}: {found.stdout}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_its_changes_fit(page: Path) -> None:
    """Those to files of the repository; the others follow what the page makes."""
    texts = dict[str, str]()
    for one in listings_of(page):
        if one.file is not None and (ROOT / one.file).is_file():
            text = texts.get(one.file, (ROOT / one.file).read_text())
            is_change = one.language == "diff"
            texts[one.file] = changed(text, one.text) if is_change else one.text


@pytest.mark.slow
@pytest.mark.parametrize("pages", IN_A_CLONE, ids=" and ".join)
def test_the_page_does_what_it_says_in_a_clone(
    pages: tuple[str, ...], tmp_path: Path, commands: Commands
) -> None:
    clone = fresh_clone(tmp_path / "clone")
    listings = [one for name in pages for one in listings_of(FOLDER / f"{name}.md")]
    problems = run_listings(listings, clone, commands)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("pages", WITH_THE_PACKAGE, ids=" and ".join)
def test_the_page_does_what_it_says_in_an_empty_folder(
    pages: tuple[str, ...], installed: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    listings = [one for name in pages for one in listings_of(FOLDER / f"{name}.md")]
    problems = run_listings(listings, folder, commands, installed)
    assert not problems, "\n".join(problems)
