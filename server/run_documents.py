"""Plain values of a run in JSON files: whole or not there, and damage is said."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from knnper.config.errors import RunError
from knnper.durable_files import write_atomically


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write plain values; NaN and infinities become null."""
    write_atomically(path, f"{json.dumps(finite(document), indent=2)}\n")


def read_document(path: Path) -> dict[str, Any]:
    """Return what a file in a run's folder holds.

    Raises
    ------
    RunError
        If there is no such file, since the run is not done, or it is damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is missing: the run is not done; go on with it with "
            f"--resume {path.parent}"
        ) from error
    except ValueError as error:
        raise RunError(f"{path} is damaged, expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged, expected a JSON object")
    return document


def finite(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which null stands for what JSON has no number for."""
    plain: dict[str, Any] = json.loads(to_json(value, inf_nan_mode="null"))
    return plain
