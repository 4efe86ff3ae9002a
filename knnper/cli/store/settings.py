"""A store's settings from the command line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastore.settings import StoreSettings

SOURCE = "the store's settings"


def store_settings(
    document: Mapping[str, Any], changes: Sequence[str]
) -> "StoreSettings":
    """Return the settings of ``document`` with changes ``KEY=VALUE``.

    A change of ``index.name`` alone replaces the section: parameters of one kind mean
    nothing to another.

    Raises
    ------
    ConfigError
        With all that is wrong.
    """
    from datastore.settings import StoreSettings
    from knnper.config.errors import ConfigError
    from knnper.config.overrides import apply_overrides, parse_overrides
    from knnper.config.parsing import parse_settings

    problems: list[Any] = []
    overrides = parse_overrides(changes, problems)
    begun = dict(document)
    if any(one.path == ("index", "name") for one in overrides):
        begun.pop("index", None)
    merged = apply_overrides(begun, overrides, problems)
    settings = parse_settings(StoreSettings, merged, "store", problems)
    if settings is None or problems:
        raise ConfigError(problems, SOURCE)
    return settings


def as_document(settings: "StoreSettings") -> dict[str, Any]:
    """Return settings as plain values."""
    from pydantic_core import to_jsonable_python

    document: dict[str, Any] = to_jsonable_python(settings)
    return document
