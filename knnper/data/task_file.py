"""Read the task of a federation from an experiment or an exported model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knnper.data.catalogue import DATA_SETS
from knnper.data.examples import DataFormat
from knnper.data.site_task import SITES, SitesSettings, SiteTask, parse_task, task_of
from knnper.errors import ConfigError, DataError, Problem
from knnper.files import parse_json, read_plain, require_plain
from knnper.settings import Settings, alternatives, parse_settings
from knnper.yaml_text import parse_yaml

MODEL_CARD = "model.json"
_TASK_EXPECTED = "give an experiment's YAML file, or the folder of an exported model"


def read_task(path: Path) -> SiteTask:
    """Read the task in the folder of an exported model, or in an experiment file."""
    card = path if path.name == MODEL_CARD else path / MODEL_CARD
    if card.is_file():
        if path.is_dir():
            require_plain(path)
        return _parse_card(card)
    if not path.is_file():
        raise DataError(
            f"{path}: found neither an experiment's YAML file nor a folder with "
            f"{MODEL_CARD}; give the path of the file or folder from the federation's "
            "operator"
        )
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text in UTF-8: {error}; {_TASK_EXPECTED}"
        ) from error
    section = document.get("data") if isinstance(document, Mapping) else None
    return _parse_section(section if isinstance(section, Mapping) else {}, str(path))


def _parse_card(card: Path) -> SiteTask:
    try:
        document = parse_json(read_plain(card))
    except ValueError as error:
        raise DataError(
            f"{card} is not JSON: {error}; export the model again"
        ) from error
    described = document.get("card") if isinstance(document, Mapping) else None
    if not isinstance(described, Mapping):
        raise DataError(f"{card} does not describe a model; export the model again")
    return parse_task(described, str(card))


def _parse_section(section: Mapping[str, Any], source: str) -> SiteTask:
    kinds: dict[str, type[Settings]] = {SITES: SitesSettings, **DATA_SETS}
    name = section.get("name")
    if not isinstance(name, str) or name not in kinds:
        raise DataError(
            f"{source}: found data.name {name!r}, expected a format of an experiment; "
            f"{_TASK_EXPECTED}. {alternatives(str(name), kinds)}"
        )
    problems: list[Problem] = []
    values = {key: value for key, value in section.items() if key != "name"}
    settings = parse_settings(kinds[name], values, "data", problems)
    if isinstance(settings, SitesSettings):
        return settings.task()
    if not isinstance(settings, DataFormat):
        raise ConfigError(problems, source)
    try:
        return task_of(settings.load())
    except DataError as error:
        raise DataError(
            f"{source} uses a data set that cannot be loaded on this machine: {error}; "
            "ask the federation's operator for the submitted experiment in the run's "
            "folder, or for an exported model"
        ) from error
