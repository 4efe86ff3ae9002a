"""Write each client's share of a data set to a file, for sites."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from knnper.data.examples import Dataset
from knnper.data.site_task import SITES, sites_settings, task_of
from knnper.errors import DataError
from knnper.files import whole_folder
from knnper.simulation.partition.clients import Partition

LABELS_FILE = "labels.json"


def export_shares(dataset: Dataset, partition: Partition, folder: Path) -> list[str]:
    """Write each client's share of a data set to a file; return the files' names."""
    if folder.exists():
        raise DataError(f"{folder} already exists, expected a new folder")
    task = to_jsonable_python(sites_settings(task_of(dataset)))
    agreement: dict[str, Any] = {"data": {"name": SITES, **task}, "clients": {}}
    names = {"class_names": np.array(dataset.class_names)}
    if dataset.feature_names:
        names["feature_names"] = np.array(dataset.feature_names)
    try:
        with whole_folder(folder) as draft:
            for client in partition.clients:
                arrays: dict[str, Any] = dict(names)
                about: dict[str, Any] = {"seen": client.seen}
                for split, source, positions in (
                    ("train", dataset.train, client.train),
                    ("validation", dataset.train, client.validation),
                    ("test", dataset.test, client.test),
                ):
                    arrays[f"{split}_inputs"] = np.asarray(source.images[positions])
                    arrays[f"{split}_labels"] = np.asarray(source.labels[positions])
                    about[f"num_{split}"] = len(positions)
                np.savez(draft / f"{client.shown}.npz", **arrays)
                agreement["clients"][client.shown] = about
            (draft / LABELS_FILE).write_text(json.dumps(agreement, indent=2))
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    return [f"{client.shown}.npz" for client in partition.clients]
