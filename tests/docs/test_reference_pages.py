"""The pages on settings and methods say what the catalogues say."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from datastore.index.catalogue import INDEX_KINDS
from datastore.protonn.settings import ProtoNNSettings
from datastore.settings import StoreSettings
from datastore.tuning.settings import PriorPoint, TuningSettings
from knnper.config.catalogue import SettingsTypes
from knnper.config.sections import (
    ConstantSchedule,
    FederationSettings,
    MultiStepSchedule,
    RunSettings,
    TrainingSettings,
)
from simulation.catalogue import experiment_catalogue
from strategies.catalogue import METHODS
from strategies.personalizers import PERSONALIZERS

Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]

SPELLED_OUT = "; all updates of a round at once"
PAGE = "docs/configuration.md"
CATALOGUE = experiment_catalogue()
TYPES: Mapping[str, SettingsTypes] = {
    "data": CATALOGUE.data,
    "partition": CATALOGUE.partition,
    "model": CATALOGUE.model,
    "training": {"": TrainingSettings},
    "training.schedule": {
        "constant": ConstantSchedule,
        "multi_step": MultiStepSchedule,
    },
    "personalization.tuning": {"": TuningSettings},
    "personalization.tuning.prior": {"": PriorPoint},
    "personalization.prototypes": {"": ProtoNNSettings},
    "personalization.store": {"": StoreSettings},
    "personalization.store.index": {
        name: kind.settings_type for name, kind in INDEX_KINDS.items()
    },
    "run": {"": RunSettings},
    "run.federation": {"": FederationSettings},
}


def described(annotation: Any) -> str:
    """Return the type of a setting as the page writes it."""
    if get_origin(annotation) is Annotated:
        bare, *extras = get_args(annotation)
        rules = [
            rule
            for extra in extras
            if isinstance(extra, FieldInfo)
            for rule in extra.metadata
        ]
        return with_range(bare, rules)
    if get_origin(annotation) in (Union, UnionType):
        return unions(get_args(annotation))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        return f"list: {described(get_args(annotation)[0])}"
    if dataclasses.is_dataclass(annotation):
        return "mapping"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names[annotation]


def unions(members: tuple[Any, ...]) -> str:
    if all(dataclasses.is_dataclass(member) for member in members):
        return "mapping"
    value, other = members
    return f"{described(value)}, or {'null' if other is NoneType else described(other)}"


def with_range(bare: Any, rules: list[Any]) -> str:
    name = described(bare)
    bounds = {type(rule): rule for rule in rules}
    if MinLen in bounds:
        least = f"of at least {bounds[MinLen].min_length}"
        if bare is str:
            return f"{name} {least} character"
        return name.replace("list", f"list {least}")
    if Le in bounds or Lt in bounds:
        low = f"[{bounds[Ge].ge}" if Ge in bounds else f"({bounds[Gt].gt}"
        high = f"{bounds[Le].le}]" if Le in bounds else f"{bounds[Lt].lt})"
        return f"{name} in {low}, {high}"
    if Ge in bounds:
        return f"{name} ≥ {bounds[Ge].ge}"
    return f"{name} > {bounds[Gt].gt}" if Gt in bounds else name


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a setting as the page writes it."""
    if field.default_factory is not dataclasses.MISSING:
        plain = abridged(field.default_factory())
    elif field.default is not dataclasses.MISSING:
        plain = to_jsonable_python(field.default)
    else:
        return "*required*"
    text = plain if isinstance(plain, str) else json.dumps(plain)
    return f"`{text.replace(chr(34), '')}`"


def abridged(settings: Any) -> dict[str, str]:
    """Return what has to be written for default settings: at most their name."""
    return {"name": settings.name} if hasattr(settings, "name") else {}


def expected_rows(settings_type: Any) -> dict[str, tuple[str, str]]:
    hints = get_type_hints(settings_type, include_extras=True)
    return {
        field.name: (described(hints[field.name]), default_of(field))
        for field in dataclasses.fields(settings_type)
        if field.name != "name"
    }


def documented(tables: Tables, section: str) -> dict[str, dict[str, list[str]]]:
    """Return the table of each name that the page gives in a section."""
    found: dict[str, dict[str, list[str]]] = {}
    for (heading, below), rows in tables(PAGE).items():
        if heading == f"`{section}`" and (below or rows):
            for name in below.replace("`", "").split(", "):
                assert name not in found, f"{section}: {name} is described twice"
                found[name] = rows
    return found


@pytest.mark.parametrize("section", TYPES)
def test_settings_are_described(tables: Tables, section: str) -> None:
    pages = documented(tables, section)
    assert pages.keys() == TYPES[section].keys()
    for name, settings_type in TYPES[section].items():
        rows = {key: tuple(cells[:2]) for key, cells in pages[name].items()}
        assert rows == expected_rows(settings_type), f"{section} {name}"
        assert all(cells[2] for cells in pages[name].values())


def test_every_section_is_described(tables: Tables) -> None:
    sections = {heading.strip("`") for heading, _ in tables(PAGE)} - {""}
    assert sections == TYPES.keys() | {"name", "method", "personalization"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("methods", name) for name in METHODS),
        *(("personalization", name) for name in PERSONALIZERS),
    ],
)
def test_a_method_has_its_page(tables: Tables, folder: str, name: str) -> None:
    page = f"docs/{folder}/{name}.md"
    spec = METHODS[name] if folder == "methods" else PERSONALIZERS[name]
    title = spec.title or "As it is"
    headings = {heading for heading, _ in tables(page)}
    wanted = {"Settings"}
    if folder == "methods":
        wanted |= {"What it does", "Departures", "Cost", "Unseen clients"}
    assert wanted <= headings
    assert Path(page).read_text().splitlines()[0] == f"# {title} (`{name}`)"
    found = tables(page)["Settings", ""]
    rows = {key: tuple(cells[:2]) for key, cells in found.items()}
    assert rows == expected_rows(spec.settings_type)
    assert all(cells[2] for cells in found.values())


def test_methods_are_listed(tables: Tables) -> None:
    (listed,) = [rows for rows in tables("docs/methods.md").values() if rows]
    assert listed == {
        f"[{spec.title}](methods/{name}.md)": [
            f"`{name}`",
            spec.upload,
            spec.download,
            spec.client_state,
            spec.server_state + (SPELLED_OUT if spec.holds_all_updates else ""),
            spec.unseen,
        ]
        for name, spec in METHODS.items()
    }


def test_personalizations_are_listed(tables: Tables) -> None:
    (listed,) = [rows for rows in tables("docs/personalization.md").values() if rows]
    assert listed == {
        f"[{spec.title or 'As it is'}](personalization/{name}.md)": [
            f"`{name}`",
            spec.summary,
            spec.unseen,
        ]
        for name, spec in PERSONALIZERS.items()
    }
