"""One decoded data set as a folder of .npy files and a manifest."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from knnper.config.errors import DataError
from knnper.data.dataset import Dataset, LabelledArrays
from knnper.data.examples import InputDtype, InputSpec
from knnper.data.pixel_statistics import channel_statistics
from knnper.data.row_file import RowFile, rows_in_parts
from knnper.data.whole_entry import sync_to_disc

FORMAT_VERSION = 1
Split: TypeAlias = Literal["train", "test"]
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Contents:
    """What is known of a data set besides its arrays.

    Attributes
    ----------
    class_names
        One for each label.
    coarse_of
        The coarse label of each label, or None.
    dtype
        What the images are: pixels, or the ids of text.
    domain_names
        One for each domain, where there are any.
    """

    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None = None
    dtype: Literal["uint8", "token"] = "uint8"
    domain_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds; ``shapes`` names every array of the entry."""

    format_version: int
    name: str
    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shapes: dict[str, tuple[int, ...]]
    dtype: InputDtype = "uint8"
    domain_names: tuple[str, ...] = ()


class EntryWriter:
    """Writes the arrays of one entry into a folder of its own.

    Parameters
    ----------
    folder
        An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays: dict[str, np.memmap[Any, Any]] = {}
        self._grown: dict[str, RowFile] = {}

    def new_images(
        self, split: Split, shape: tuple[int, int, int, int]
    ) -> NDArray[np.uint8]:
        """Return a zeroed array on disc to decode into.

        Parameters
        ----------
        shape
            (n, height, width, channels).

        Raises
        ------
        DataError
            If there are no images or not enough room on the disc.
        """
        if shape[0] == 0:
            raise DataError(f"there are no {split} images; at least one is needed")
        self._require_room(int(np.prod(shape)))
        return self._new_array(f"{split}_images", shape, np.dtype(np.uint8))

    def put_images(self, split: Split, images: NDArray[np.uint8]) -> None:
        """Store ``images``, uint8 of shape (n, height, width, channels)."""
        count, height, width, channels = images.shape
        self.new_images(split, (count, height, width, channels))[...] = images

    def put_labels(
        self, split: Split, labels: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store the n labels of a split."""
        self._put_integers(f"{split}_labels", labels)

    def put_client_ids(
        self, split: Split, client_ids: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store whom each of the n images of a split belongs to."""
        self._put_integers(f"{split}_client_ids", client_ids)

    def put_domain_ids(
        self, split: Split, domain_ids: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store which domain each of the n images of a split is from."""
        self._put_integers(f"{split}_domain_ids", domain_ids)

    def append_of_client(
        self,
        split: Split,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        client_id: int,
    ) -> None:
        """Store some of a client's images after those that are there already.

        For data sets of which only a part is in memory at a time. A split is either
        appended to or put as a whole.

        Parameters
        ----------
        images
            uint8, shape (n, height, width, channels).
        labels
            Shape (n,).
        client_id
            Whom all of them belong to.

        Raises
        ------
        DataError
            If there is not enough room on the disc.
        """
        self._require_room(images.nbytes)
        self._append(f"{split}_images", images)
        self._append(f"{split}_labels", labels)
        self._append(f"{split}_client_ids", np.full(len(labels), client_id, np.int64))

    def seal(self, name: str, contents: Contents) -> None:
        """Write the manifest and see to it that everything is on the disc."""
        shapes = self._finish()
        mean, std = self._statistics(contents)
        manifest = Manifest(
            FORMAT_VERSION, name, **asdict(contents), mean=mean, std=std, shapes=shapes
        )
        (self._folder / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        for file in self._folder.iterdir():
            sync_to_disc(file)
        sync_to_disc(self._folder)

    def _statistics(
        self, contents: Contents
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if contents.dtype == "token":
            return (), ()
        return channel_statistics(rows_in_parts(self._file("train_images")))

    def _finish(self) -> dict[str, tuple[int, ...]]:
        """Bring all arrays into their files; return their shapes."""
        for array in self._arrays.values():
            array.flush()
        mapped = {name: array.shape for name, array in self._arrays.items()}
        return mapped | {name: rows.finish() for name, rows in self._grown.items()}

    def _append(self, name: str, rows: NDArray[Any]) -> None:
        if name not in self._grown:
            self._grown[name] = RowFile(self._file(name), rows.shape[1:], rows.dtype)
        self._grown[name].append(rows)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _put_integers(
        self, name: str, values: Sequence[int] | NDArray[np.integer]
    ) -> None:
        stored = self._new_array(name, (len(values),), np.dtype(np.int64))
        stored[:] = values

    def _new_array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.memmap[Any, Any]:
        file = self._file(name)
        array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
        self._arrays[name] = array
        return array

    def _require_room(self, num_bytes: int) -> None:
        """Ask beforehand: writing to a mapped file on a full disc kills the process."""
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise DataError(
                f"the decoded images need {num_bytes / 1e6:.0f} MB, but only "
                f"{free / 1e6:.0f} MB are free under {self._folder.parent}; make room "
                "or point KNNPER_CACHE to another disc"
            )


def read_entry(folder: Path) -> Dataset:
    """Return the data set stored in ``folder``, its arrays memory-mapped read-only.

    Raises
    ------
    FileNotFoundError
        If there is no entry.
    ValueError
        If the entry is damaged or of another format.
    """
    manifest = TypeAdapter(Manifest).validate_json((folder / _MANIFEST).read_bytes())
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"format {manifest.format_version}, expected {FORMAT_VERSION}")
    arrays = {name: _read_array(folder, name, manifest) for name in manifest.shapes}
    _, height, width, channels = arrays["train_images"].shape
    return Dataset(
        name=manifest.name,
        train=_labelled("train", arrays),
        test=_labelled("test", arrays),
        spec=InputSpec(
            image_shape=(height, width, channels),
            num_classes=len(manifest.class_names),
            mean=manifest.mean,
            std=manifest.std,
            dtype=manifest.dtype,
        ),
        class_names=manifest.class_names,
        coarse_of=manifest.coarse_of,
        domain_names=manifest.domain_names,
    )


def _read_array(folder: Path, name: str, manifest: Manifest) -> NDArray[Any]:
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    if array.shape != manifest.shapes[name]:
        raise ValueError(
            f"{name} has the shape {array.shape}, expected {manifest.shapes[name]}"
        )
    return array


def _labelled(split: Split, arrays: dict[str, NDArray[Any]]) -> LabelledArrays:
    return LabelledArrays(
        images=arrays[f"{split}_images"],
        labels=arrays[f"{split}_labels"],
        client_ids=arrays.get(f"{split}_client_ids"),
        domain_ids=arrays.get(f"{split}_domain_ids"),
    )
