"""Fixtures of the tests of the documentation."""

import re
from collections.abc import Callable

import pytest

from tests.docs.pages import read_listings, read_page


@pytest.fixture
def listings() -> Callable[[str, str], list[str]]:
    """Return a function from a page and a language to the page's listings."""
    return read_listings


@pytest.fixture
def tables() -> Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]:
    """Return a function from a page to its tables by their headings of level 2 and 3.

    A table is a dict from the first cell of a row, without back-quotes, to the others.
    """

    def read_tables(page: str) -> dict[tuple[str, str], dict[str, list[str]]]:
        tables_by_heading: dict[tuple[str, str], dict[str, list[str]]] = {}
        heading = ("", "")
        for line in read_page(page).splitlines():
            if line.startswith("## "):
                heading = (line[3:], "")
            elif line.startswith("### "):
                heading = (heading[0], line[4:])
            elif line.startswith(("| `", "| [")):
                key, *cells = re.split(r"(?<!\\)\|", line.strip("|"))
                table = tables_by_heading.setdefault(heading, {})
                table[key.strip().strip("`")] = [cell.strip() for cell in cells]
            if line.startswith("#"):
                tables_by_heading.setdefault(heading, {})
        return tables_by_heading

    return read_tables
