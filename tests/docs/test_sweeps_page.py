"""The page on sweeps says what their settings are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knnper.loading import parse_yaml
from knnper.simulation.batches.plan import (
    RandomSettings,
    RangeSettings,
    SweepSettings,
    VariantSettings,
)
from tests.docs.setting_tables import expected_rows

Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]
Listings = Callable[[str, str], list[str]]

PAGE = "docs/sweeps.md"


@pytest.mark.parametrize(
    ("below", "settings"),
    [
        ("", SweepSettings),
        ("`random`", RandomSettings),
        ("`random.keys`", RangeSettings),
        ("`variants`", VariantSettings),
    ],
)
def test_settings_are_described(tables: Tables, below: str, settings: Any) -> None:
    found = tables(PAGE)["The file", below]
    expected = expected_rows(settings)
    if settings is SweepSettings:
        expected = {"name": ("text", "*required*"), **expected}
    assert {key: tuple(cells[:2]) for key, cells in found.items()} == expected
    assert all(cells[2] for cells in found.values())


def test_the_example_is_the_file(listings: Listings) -> None:
    example = parse_yaml(listings(PAGE, "yaml")[0], PAGE)
    path = Path("papers/small/fig05_neighbors.yaml")
    assert example == parse_yaml(path.read_text(encoding="utf-8"), str(path))
