"""The page on sweeps says what their settings are, and the papers' sweeps load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knnper.config.yaml_text import parse_yaml
from simulation.batch.families import families_of
from simulation.sweep.plan import read_sweep
from simulation.sweep.settings import (
    RandomSettings,
    RangeSettings,
    SweepSettings,
    VariantSettings,
)
from tests.docs.setting_tables import expected_rows

Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]
Listings = Callable[[str, str], list[str]]

PAGE = "docs/sweeps.md"
EXPERIMENTS = Path("simulation/experiments")
FILES = sorted(
    path
    for path in EXPERIMENTS.rglob("*.yaml")
    if "\n#   knnper sweep " in path.read_text(encoding="utf-8")
)
SMALL = "small"


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
    path = EXPERIMENTS / SMALL / "fig05_neighbors.yaml"
    assert example == parse_yaml(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_papers_sweeps_load(path: Path) -> None:
    assert f"#   knnper sweep {path}\n" in path.read_text(encoding="utf-8")
    assert read_sweep(path).points


def test_small_forms_are_of_full_ones(tables: Tables) -> None:
    rows = tables(PAGE)["The papers' sweeps", ""]
    small = {path.stem for path in FILES if path.parent.name == SMALL}
    assert small == rows.keys()
    for name in small:
        full = read_sweep(EXPERIMENTS / f"{name}.yaml")
        little = read_sweep(EXPERIMENTS / SMALL / f"{name}.yaml")
        for key in ("x", "series", "group", "y"):
            assert getattr(full.settings, key) == getattr(little.settings, key)
        assert full.settings.vary.keys() == little.settings.vary.keys()
        assert full.settings.variants.keys() == little.settings.variants.keys()


def test_trainings_are_counted(tables: Tables) -> None:
    for name, cells in tables(PAGE)["The papers' sweeps", ""].items():
        sweep = read_sweep(EXPERIMENTS / f"{name}.yaml")
        families = families_of(sweep.experiments, Path(), ["knnper"])
        assert cells[1:3] == [str(len(families)), str(len(sweep.experiments))], name
