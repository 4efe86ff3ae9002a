"""The agreed task, from the files that describe it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knnper.config.errors import ConfigError, DataError, Problem
from knnper.config.parsing import parse_settings
from knnper.config.yaml_text import parse_yaml
from knnper.data.site.agreement import SITES, SitesSettings, SiteTask, site_task_of

MODEL_CARD = "model.json"


def read_task(path: Path) -> SiteTask:
    """Return the task that a file describes.

    Parameters
    ----------
    path
        An experiment over data that stays with the sites (``data: {name: sites}``), as
        ``knnper submit`` writes it, or the folder of an exported model.

    Raises
    ------
    DataError
        If there is no such file, or it describes no such task.
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
    if not isinstance(section, Mapping) or section.get("name") != SITES:
        name = section.get("name") if isinstance(section, Mapping) else None
        raise DataError(
            f"{source}: found data.name {name!r}, expected {SITES!r}: an experiment "
            "over data that stays with the sites; ask the federation's operator for "
            "the file that was submitted, or for an exported model"
        )
    problems: list[Problem] = []
    values = {key: value for key, value in section.items() if key != "name"}
    settings = parse_settings(SitesSettings, values, "data", problems)
    if settings is None:
        raise ConfigError(problems, source)
    return settings.task()
