"""The site's reference is made from the code, and says what every setting is."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs import reference
from knnper.settings import NonNegativeInt, ProperFraction, Settings
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from knnper.strategies.core.method import Method
from knnper.yaml_text import parse_yaml, read_yaml

Listings = Callable[[str, str], list[str]]


@dataclass(frozen=True)
class Inner(Settings):
    """What is inside.

    Attributes
    ----------
    depth
        How deep.
    """

    depth: NonNegativeInt | None = None


@dataclass(frozen=True)
class Outer(Settings):
    """What is outside.

    Attributes
    ----------
    low, high
        A ``part`` of it.
    inner
        See there.
    """

    low: ProperFraction
    high: ProperFraction = 0.5
    inner: Inner = Inner()


def test_table_has_type_range_default_and_meaning() -> None:
    assert [*reference.described(Outer, "outer", {})] == [
        "What is outside.",
        "| key | type | default | meaning |\n"
        "| --- | --- | --- | --- |\n"
        "| `low` | number ≥ 0, < 1 | *required* | A `part` of it. |\n"
        "| `high` | number ≥ 0, < 1 | `0.5` | A `part` of it. |\n"
        "| `inner` | mapping | `{depth: null}` | See there. |",
        "**`outer.inner`**",
        "What is inside.",
        "| key | type | default | meaning |\n"
        "| --- | --- | --- | --- |\n"
        "| `depth` | whole number ≥ 0 or null | `null` | How deep. |",
    ]


def test_every_name_and_setting_is_described() -> None:
    text = reference.settings()  # A field without a meaning is a KeyError.
    catalogue = experiment_catalogue()
    for section in ("data", "partition", "model", "method", "personalization"):
        names = getattr(catalogue, section)
        assert len(names) > 1
        for name in names:
            assert f"### `{section}: {{name: {name}}}`" in text


@pytest.mark.parametrize("entry", [*METHODS.values(), *PERSONALIZERS.values()])
def test_method_has_a_card(entry: type[Method]) -> None:
    text = "\n".join(reference.card(entry, "method"))
    assert entry.unseen in text
    assert re.search(r"\b(19|20)\d\d\b", text) or entry.name == "none"


def test_notes_belong_to_methods() -> None:
    assert {*reference.CARDS} == {"methods", "personalization"}
    for folder, entries in reference.CARDS.items():
        notes = {path.stem for path in Path("docs", folder).glob("*.md")}
        assert notes
        assert notes <= entries.keys() | {"class_prior"}


def test_commands_are_listed() -> None:
    text = reference.commands()
    assert "`knnper site serve`" in text
    assert "`knnper serve`" not in text


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("docs/reproducing.md", "papers/small/fig09_hardware.yaml"),
        ("docs/sweeps.md", "papers/small/fig05_neighbors.yaml"),
    ],
)
def test_example_equals_the_shipped_file(
    listings: Listings, page: str, path: str
) -> None:
    assert parse_yaml(listings(page, "yaml")[0], page) == read_yaml(Path(path))
