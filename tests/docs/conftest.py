"""What the pages hold: listings and tables."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def listings() -> Callable[[str, str], list[str]]:
    """Return the fenced blocks of a page, named from the root, in one language."""

    def read(page: str, language: str) -> list[str]:
        text = (ROOT / page).read_text(encoding="utf-8")
        fenced = rf"^```{language}\n(.*?)^```$"
        return re.findall(fenced, text, re.MULTILINE | re.DOTALL)

    return read


@pytest.fixture
def tables() -> Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]:
    """Return the tables of a page by their headings of level 2 and 3.

    Each is a dict from the first cell of a row, less its back-quotes, to the others.
    """

    def read(page: str) -> dict[tuple[str, str], dict[str, list[str]]]:
        found: dict[tuple[str, str], dict[str, list[str]]] = {}
        place = ("", "")
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                place = (line[3:], "")
            elif line.startswith("### "):
                place = (place[0], line[4:])
            elif line.startswith(("| `", "| [")):
                key, *cells = re.split(r"(?<!\\)\|", line.strip("|"))
                name = key.strip().strip("`")
                found.setdefault(place, {})[name] = [cell.strip() for cell in cells]
            if line.startswith("#"):
                found.setdefault(place, {})
        return found

    return read
