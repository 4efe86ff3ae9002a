"""Every tutorial does what it says, from a fresh clone on."""

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
PAGES = (
    ("first_simulation",),
    ("own_data",),
    ("deploy", "onboard"),
    ("add_a_method",),
    ("add_a_dataset",),
    ("read_a_report",),
    ("run_a_sweep",),
)
NO_CLONE = "own_model"


def test_every_page_is_listed_and_run() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == {name for pages_run in PAGES for name in pages_run} | {NO_CLONE}
    listed = re.findall(r"\((\w+)\.md\)", (FOLDER / "README.md").read_text())
    assert sorted(set(listed)) == sorted(pages)


@pytest.mark.parametrize(
    "page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem
)
def test_its_programs_pass_the_checks(page: Path) -> None:
    # Of modules that the reader writes the order of imports is not known here, and
    # who tries something out may print.
    # What is no part of the repository need not say what it is.
    also = ",D" if page.stem == NO_CLONE else ""
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


@pytest.mark.parametrize(
    "page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem
)
def test_its_changes_fit(page: Path) -> None:
    """Those to files of the repository; the others follow what the page makes."""
    texts = dict[str, str]()
    for one in listings_of(page):
        if one.file is not None and (ROOT / one.file).is_file():
            text = texts.get(one.file, (ROOT / one.file).read_text())
            is_change = one.language == "diff"
            texts[one.file] = changed(text, one.text) if is_change else one.text


@pytest.mark.slow
@pytest.mark.parametrize("pages", PAGES, ids=" and ".join)
def test_the_page_does_what_it_says(
    pages: tuple[str, ...], tmp_path: Path, commands: Commands
) -> None:
    clone = fresh_clone(tmp_path / "clone")
    listings = [one for name in pages for one in listings_of(FOLDER / f"{name}.md")]
    problems = run_listings(listings, clone, commands)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_it_works_in_an_empty_folder(
    installed: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    listings = listings_of(FOLDER / f"{NO_CLONE}.md")
    problems = run_listings(listings, folder, commands, installed)
    assert not problems, "\n".join(problems)
