"""The agreed task, from the files that describe it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from knnper.config.errors import ConfigError, DataError, Problem
from knnper.config.parsing import parse_settings
from knnper.config.sections import Settings
from knnper.config.suggestions import alternatives
from knnper.config.yaml_text import parse_yaml
from knnper.data.catalogue import DATA_SETS, DataSpec
from knnper.data.site.agreement import (
    SITES,
    SitesSettings,
    SiteTask,
    site_task_of,
    task_of,
)

MODEL_CARD = "model.json"

S = TypeVar("S", bound=Settings)


def read_task(path: Path) -> SiteTask:
    """Return the task that a file describes.

    Parameters
    ----------
    path
        An experiment over data that stays with the sites (``data: {name: sites}``), as
        ``knnper submit`` writes it; one over a data set, which is loaded; or the folder
        of an exported model.

    Raises
    ------
    DataError
        If there is no such file, it describes no such task, or the data set that it
        names cannot be loaded here.
    ConfigError
        With all that is wrong in the experiment's section ``data``.
    """
    card = path / MODEL_CARD
    if card.is_file():
        return _of_card(card)
    if not path.is_file():
        raise DataError(
            f"{path}: found neither an experiment's YAML file nor a folder with "
            f"{MODEL_CARD}; give what the federation's operator gave you"
        )
    return _of_experiment(path)


def _of_card(card: Path) -> SiteTask:
    try:
        document = json.loads(card.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{card} is no JSON: {error}; export the model again"
        ) from error
    described = document.get("card") if isinstance(document, Mapping) else None
    if not isinstance(described, Mapping):
        raise DataError(f"{card} describes no model; export the model again")
    return site_task_of(described, str(card))


def _of_experiment(path: Path) -> SiteTask:
    source = str(path)
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), source)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}") from error
    section = document.get("data") if isinstance(document, Mapping) else None
    return _of_section(section, source)


def _of_section(section: Any, source: str) -> SiteTask:
    name = section.get("name") if isinstance(section, Mapping) else None
    if name == SITES:
        return _parsed(SitesSettings, section, source).task()
    if isinstance(name, str) and name in DATA_SETS:
        spec = DATA_SETS[name]
        return _of_data_set(spec, _parsed(spec.settings_type, section, source), source)
    known = alternatives(str(name), (SITES, *DATA_SETS))
    raise DataError(
        f"{source}: found data.name {name!r}, expected that of an experiment; {known}"
    )


def _of_data_set(spec: DataSpec, settings: Settings, source: str) -> SiteTask:
    try:
        return task_of(spec.load(settings))
    except DataError as error:
        raise DataError(
            f"{source} is over a data set that cannot be loaded here: {error}; ask the "
            "federation's operator for the experiment as it was submitted, from the "
            "run's folder, or for an exported model"
        ) from error


def _parsed(settings_type: type[S], section: Mapping[str, Any], source: str) -> S:
    problems: list[Problem] = []
    values = {key: value for key, value in section.items() if key != "name"}
    settings = parse_settings(settings_type, values, "data", problems)
    if settings is None:
        raise ConfigError(problems, source)
    return settings
