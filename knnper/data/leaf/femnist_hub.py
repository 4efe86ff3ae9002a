"""FEMNIST as Flower keeps it on the Hugging Face Hub."""

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knnper.config.errors import DataError
from knnper.data.cache import cache_root, cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter
from knnper.data.dataset import Dataset
from knnper.data.leaf.dividing import DividingSettings
from knnper.data.leaf.loading import WRITTEN_CHARACTERS, divided, write_parts
from knnper.data.leaf.samples import PIXELS_SHAPE, Samples
from knnper.data.leaf.user_file import User

_NAME_ON_HUB = "flwrlabs/femnist"


@dataclass(frozen=True, kw_only=True)
class FemnistHubSettings(DividingSettings):
    """Where the downloaded files are kept, and how each writer's images are divided.

    Attributes
    ----------
    root
        The folder of the downloaded files; null is ``downloads`` in the cache folder.
    """

    root: str | None = None

    def folder(self) -> Path:
        """Return the absolute ``root``."""
        if self.root is None:
            return cache_root() / "downloads"
        return Path(self.root).expanduser().absolute()


def load_femnist_hub(settings: FemnistHubSettings) -> Dataset:
    """Return FEMNIST: images of shape (28, 28, 1), 62 classes, by writer.

    It is downloaded if it is not in ``root``, 814,277 images.

    Raises
    ------
    DataError
        If it cannot be downloaded, or the package flwr-datasets is not installed.
    """

    def build(writer: EntryWriter) -> Contents:
        users = _writers(_all_rows(settings.folder()))
        write_parts(writer, divided(users, settings))
        return Contents(WRITTEN_CHARACTERS)

    # What the Hub holds under one name does not depend on where it is kept.
    source = asdict(settings)
    del source["root"]
    return cached_dataset("femnist_hub", source, build)


def _all_rows(folder: Path) -> Any:
    """Return a table of the columns image, writer_id and character."""
    try:
        package = importlib.import_module("flwr_datasets")
    except ModuleNotFoundError as error:
        raise DataError(
            "femnist_hub needs the package flwr-datasets, which is not installed; "
            "pip install 'knnper[hub]', or give LEAF's own files to leaf_femnist"
        ) from error
    try:
        # Unshuffled, a writer's rows lie together and are read fast.
        federated = package.FederatedDataset(
            dataset=_NAME_ON_HUB, partitioners={}, shuffle=False, cache_dir=str(folder)
        )
        return federated.load_split("train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{_NAME_ON_HUB} cannot be loaded into {folder}: {error}; check the "
            "connection, or give LEAF's own files to leaf_femnist"
        ) from error


def _writers(rows: Any) -> Iterator[User]:
    """Yield the writers in the order of their names, each with all of its images."""
    names, owner = np.unique(np.array(rows["writer_id"][:]), return_inverse=True)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    for name, places in zip(names, np.split(by_owner, ends[:-1]), strict=True):
        yield User(str(name), _samples(rows[places.tolist()]))


def _samples(columns: Any) -> Samples:
    images = [np.asarray(image.convert("L")) for image in columns["image"]]
    return Samples(
        np.stack(images).reshape(-1, *PIXELS_SHAPE),
        np.asarray(columns["character"], dtype=np.int64),
    )
