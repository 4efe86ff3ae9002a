"""The page on reproducing says what the settings of a figure's file are."""

import re
from collections.abc import Callable
from pathlib import Path

from knnper.loading import parse_yaml, read_yaml
from papers.catalogue import FIGURES, FigureFileSettings
from papers.reproduce import KINDS
from tests.docs.setting_tables import expected_rows

Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]
Listings = Callable[[str, str], list[str]]

PAGE = "docs/reproducing.md"
THE_FILE = "The file of a figure"


def test_settings_are_described(tables: Tables) -> None:
    found = tables(PAGE)[THE_FILE, ""]
    expected = {"name": ("text", "*required*"), **expected_rows(FigureFileSettings)}
    assert {key: tuple(cells[:2]) for key, cells in found.items()} == expected
    assert all(cells[2] for cells in found.values())


def test_options_are_described(tables: Tables) -> None:
    found = {
        below.strip("`"): {key: tuple(cells[:2]) for key, cells in rows.items()}
        for (section, below), rows in tables(PAGE).items()
        if section == THE_FILE and below
    }
    with_options = {name: expected_rows(one.settings) for name, one in FIGURES.items()}
    assert found == {name: rows for name, rows in with_options.items() if rows}


def test_the_example_is_the_file(listings: Listings) -> None:
    example = parse_yaml(listings(PAGE, "yaml")[0], PAGE)
    path = Path("papers/small/fig09_hardware.yaml")
    assert example == read_yaml(path)


def test_kinds_are_told_by_their_keys(tables: Tables) -> None:
    rows = tables(PAGE)["", ""]
    found = {
        cells[0].split(",")[0].split()[1]: set(re.findall(r"\w+", key)) - {"or"}
        for key, cells in rows.items()
        if not key.startswith("--")
    }
    assert found == {kind: set(keys) for kind, keys in KINDS.items()}
