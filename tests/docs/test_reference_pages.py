"""The pages on settings and methods say what the catalogues say."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from knnper.client.settings import LimitSettings
from knnper.datastore.index_kinds import INDEX_KINDS
from knnper.datastore.prediction import ClassPriorSettings
from knnper.datastore.protonn import ProtoNNSettings
from knnper.datastore.settings import StoreSettings
from knnper.datastore.tuning import PriorPoint, TuningSettings
from knnper.experiment import (
    ConstantSchedule,
    FederationSettings,
    MultiStepSchedule,
    RunSettings,
    SettingsTypes,
    TrainingSettings,
)
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from tests.docs.setting_tables import expected_rows

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
    "personalization.class_prior": {"": ClassPriorSettings},
    "personalization.tuning": {"": TuningSettings},
    "personalization.tuning.prior": {"": PriorPoint},
    "personalization.prototypes": {"": ProtoNNSettings},
    "personalization.store": {"": StoreSettings},
    "personalization.store.index": dict(INDEX_KINDS),
    "run": {"": RunSettings},
    "run.federation": {"": FederationSettings},
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


def test_limits_of_a_site_are_described(tables: Tables) -> None:
    found = tables("docs/security.md")["The settings", ""]
    rows = {key: tuple(cells[:2]) for key, cells in found.items()}
    assert rows == expected_rows(LimitSettings)
    assert all(cells[2] for cells in found.values())


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
