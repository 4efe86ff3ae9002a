"""The page on comparisons says what their settings are, and its files load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knnper.simulation.batches.plan import (
    ComparisonSettings,
    RowSettings,
    read_comparison,
)
from knnper.strategies.catalogue import METHODS
from tests.docs.setting_tables import expected_rows

Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]
FILES = [
    Path("simulation/experiments") / f"table2_{data}.yaml"
    for data in ("cifar10", "digits")
]


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        (("The file", ""), ComparisonSettings),
        (("The file", "`rows`"), RowSettings),
    ],
)
def test_settings_are_described(
    tables: Tables, place: tuple[str, str], settings: Any
) -> None:
    found = tables("docs/comparison.md")[place]
    expected = expected_rows(settings)
    if settings is ComparisonSettings:
        expected = {"name": ("text", "*required*"), **expected}
    assert {key: tuple(cells[:2]) for key, cells in found.items()} == expected
    assert all(cells[2] for cells in found.values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_compares_the_methods(path: Path) -> None:
    comparison = read_comparison(path)
    runs = [points[0].tuning for points in comparison.variants.values()]
    methods = {
        run.method.name
        for run in runs
        if run is not None
        and (
            run.personalization.name == "none"
            or METHODS[run.method.name].personalization != "none"
        )
    }
    assert len(methods) >= 35  # a new method may be given a row, and need not
    assert len(comparison.seeds) == (3 if "digits" in path.stem else 1)
