"""Under what conditions a run was made."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import knnper

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
        "versions": {
            "python": platform.python_version(),
            "knnper": knnper.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
