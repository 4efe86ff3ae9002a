"""Under what conditions a run was made."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import knnper
from knnper.config.errors import RunError

_PACKAGES = (
    "flwr",
    "ray",
    "torch",
    "torchvision",
    "faiss-cpu",
    "numpy",
)


def build_manifest(
    *,
    results_identity: str,
    partition_hash: str,
    command: Sequence[str],
    started: datetime,
) -> dict[str, Any]:
    """Return versions, machine and provenance as plain values.

    Parameters
    ----------
    results_identity, partition_hash
        What was run, on which split of the data.
    command
        What the user typed.
    started
        When, with a time zone.
    """
    return {
        "results_identity": results_identity,
        "partition_hash": partition_hash,
        "command": list(command),
        "started": started.isoformat(timespec="seconds"),
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Return versions and machine as plain values."""
    return {
        "versions": {
            "python": platform.python_version(),
            "knnper": knnper.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def complete_manifest(
    first: Mapping[str, Any] | None, manifest: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return all that is known of a run that begins, or is gone on with.

    Parameters
    ----------
    first
        What was known before; None where the run begins.
    manifest
        Of now. Of a run that is gone on with, it adds the command and the time to what
        ``first`` has under ``resumed``.
    folder
        The run's; named in errors.

    Raises
    ------
    RunError
        If the data is split otherwise than when the run was started.
    """
    if first is None:
        return {**manifest, "resumed": []}
    expected, found = first["partition_hash"], manifest["partition_hash"]
    if expected != found:
        raise RunError(
            f"the data is not what it was when the run in {folder} began: expected the "
            f"split {expected[:12]}, found {found[:12]}. Bring it back, or start again"
        )
    again = {"command": manifest["command"], "started": manifest["started"]}
    return {**first, "resumed": [*first["resumed"], again]}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
