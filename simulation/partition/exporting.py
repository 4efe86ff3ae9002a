"""Virtual clients as files: one .npz for each, as a real client reads it."""

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from pydantic_core import to_jsonable_python

from knnper.config.errors import DataError
from knnper.data.dataset import Dataset
from knnper.data.site.agreement import SITES, sites_settings, task_of
from simulation.partition.split import ClientPart, Partition

LABELS_FILE = "labels.json"


def export_shares(dataset: Dataset, partition: Partition, folder: Path) -> list[str]:
    """Write each client's share of a data set to a file; return the files' names.

    ``NAME.npz`` holds, for each split, SPLIT_inputs and SPLIT_labels, and class_names;
    own data of the kind ``npz`` reads it, in the same order. ``labels.json`` holds
    what the clients agree on, as the section ``data`` of an experiment over data that
    stays with the sites, and which clients there are.

    Parameters
    ----------
    dataset
        What was dealt.
    partition
        To whom.
    folder
        A new folder; it is there as a whole or not at all.

    Raises
    ------
    DataError
        If the folder is there, or cannot be written.
    """
    if folder.exists():
        raise DataError(f"{folder} is there already; expected a new folder")
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir(parents=True)
        for client in partition.clients:
            _write_share(dataset, client, draft / f"{client.name}.npz")
        (draft / LABELS_FILE).write_text(
            json.dumps(_agreement(dataset, partition), indent=2)
        )
        draft.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return [f"{client.name}.npz" for client in partition.clients]


def _write_share(dataset: Dataset, client: ClientPart, path: Path) -> None:
    parts = {
        "train": (dataset.train, client.train),
        "validation": (dataset.train, client.validation),
        "test": (dataset.test, client.test),
    }
    arrays: dict[str, Any] = {"class_names": np.array(dataset.class_names)}
    for split, (source, positions) in parts.items():
        arrays[f"{split}_inputs"] = np.asarray(source.images[positions])
        arrays[f"{split}_labels"] = np.asarray(source.labels[positions])
    np.savez(path, **arrays)


def _agreement(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    return {
        "data": {"name": SITES, **to_jsonable_python(sites_settings(task_of(dataset)))},
        "clients": {
            client.name: {
                "seen": client.seen,
                "num_train": len(client.train),
                "num_validation": len(client.validation),
                "num_test": len(client.test),
            }
            for client in partition.clients
        },
    }
