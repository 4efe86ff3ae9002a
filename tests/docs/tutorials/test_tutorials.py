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
TUTORIALS_WITH_PYTHON = [
    page
    for page in TUTORIALS
    if any(listing.language == "python" for listing in listings_of(page))
]
TUTORIALS_WITH_CHANGES = [
    page
    for page in TUTORIALS
    if any(
        listing.file is not None and (ROOT / listing.file).is_file()
        for listing in listings_of(page)
    )
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


@pytest.mark.parametrize("name", [name for many in WITH_THE_PACKAGE for name in many])
def test_page_for_the_package_does_not_use_the_repository(name: str) -> None:
    listings = listings_of(FOLDER / f"{name}.md")
    assert listings
    for listing in listings:
        assert not re.search(r"\bmake \w|\bmake$|git |papers|tests/", listing.text)


@pytest.mark.parametrize("page", TUTORIALS_WITH_PYTHON, ids=lambda page: page.stem)
def test_python_listings_pass_the_checks(page: Path) -> None:
    # The order of imports is unknown here for modules that the reader writes, and
    # scripts may print. Only files of the repository need docstrings.
    also = "" if page.parent != FOLDER else ",D,S101,ARG002"
    check = ["check", "--ignore", f"I001,T201{also}"]
    for listing in listings_of(page):
        if listing.language == "python":
            for arguments in (check, ["format", "--check"]):
                command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename"]
                result = subprocess.run(
                    [*command, str(listing.file), "-"],
                    input=listing.text,
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=ROOT,
                )
                assert result.returncode == 0, f"{listing.file}: {result.stdout}"


@pytest.mark.parametrize("page", TUTORIALS_WITH_CHANGES, ids=lambda page: page.stem)
def test_changes_fit_files_of_the_repository(page: Path) -> None:
    texts = dict[str, str]()
    for listing in listings_of(page):
        if listing.file is not None and (ROOT / listing.file).is_file():
            text = texts.get(listing.file, (ROOT / listing.file).read_text())
            texts[listing.file] = changed(text, listing.text)
    assert texts


@pytest.mark.slow
@pytest.mark.parametrize("pages", IN_A_CLONE, ids=" and ".join)
def test_tutorial_runs_in_a_clone(
    pages: tuple[str, ...], tmp_path: Path, commands: Commands
) -> None:
    clone = fresh_clone(tmp_path / "clone")
    listings = [
        listing for name in pages for listing in listings_of(FOLDER / f"{name}.md")
    ]
    problems = run_listings(listings, clone, commands)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("pages", WITH_THE_PACKAGE, ids=" and ".join)
def test_tutorial_runs_in_an_empty_folder(
    pages: tuple[str, ...], installed: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    listings = [
        listing for name in pages for listing in listings_of(FOLDER / f"{name}.md")
    ]
    problems = run_listings(listings, folder, commands, installed)
    assert not problems, "\n".join(problems)
