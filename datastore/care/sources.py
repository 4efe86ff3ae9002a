"""Where a client's examples come from: a folder of images, or arrays in a file."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.config.errors import DataError
from knnper.data.image_file import read_image

Array = NDArray[np.generic]
ImageShape = tuple[int, int, int]
"""(height, width, channels)."""

LAYOUT = "SOURCE/CLASS/IMAGE, or a file .npz with the arrays inputs and labels"


class Source(Protocol):
    """n examples with labels, and images that are read when they are needed.

    Attributes
    ----------
    labels
        int64, shape (n,).
    external_ids
        The names of the examples, or None for one without.
    arrivals
        Seconds since 1970 (UTC), float64 of shape (n,); None is now.
    """

    @property
    def labels(self) -> Tensor: ...  # noqa: D102

    @property
    def external_ids(self) -> Sequence[str | None]: ...  # noqa: D102

    @property
    def arrivals(self) -> Tensor | None: ...  # noqa: D102

    def images(self, positions: Sequence[int]) -> Tensor:
        """Return uint8 of shape (m, height, width, channels)."""


@dataclass(frozen=True)
class FolderSource:
    """Images in one folder for each class.

    An image's external id is its path in the folder; its size is made that of the
    store's, as the data set ``image_folder`` does with ``image_size``.
    """

    root: Path
    external_ids: tuple[str, ...]
    labels: Tensor
    image_shape: ImageShape
    arrivals: None = None

    def images(self, positions: Sequence[int]) -> Tensor:
        """See `Source`."""
        paths = [self.root / self.external_ids[one] for one in positions]
        return _decoded(paths, self.image_shape)


@dataclass(frozen=True)
class ArraySource:
    """Arrays of one file, in memory."""

    inputs: Tensor
    labels: Tensor
    external_ids: tuple[str | None, ...]
    arrivals: Tensor | None

    def images(self, positions: Sequence[int]) -> Tensor:
        """See `Source`."""
        return self.inputs[list(positions)]


def open_source(
    path: Path, image_shape: ImageShape, class_names: Sequence[str]
) -> Source:
    """Return the examples in ``path``: SOURCE/CLASS/IMAGE, or an .npz file.

    Parameters
    ----------
    path
        A folder with one folder of images for each class, or a file with ``inputs``
        (uint8, (n, height, width, channels)), ``labels`` (n,) and optionally
        ``external_ids`` (n,), where an empty text is none, and ``arrivals`` (n,).
    image_shape
        What the store was made for.
    class_names
        One for each label.

    Raises
    ------
    DataError
        If it is neither, has unknown classes, or does not fit.
    """
    if path.is_dir():
        return _folder(path, image_shape, class_names)
    if path.suffix == ".npz":
        return _arrays(path, image_shape)
    raise DataError(f"{path}: found neither a folder nor a file .npz; give {LAYOUT}")


def read_inputs(path: Path, image_shape: ImageShape) -> NDArray[np.uint8]:
    """Return the raw inputs in one file, uint8 of shape (n, *image_shape).

    Parameters
    ----------
    path
        An .npz file with ``inputs``, an .npy file with one input or several, or an
        image.
    image_shape
        What the store was made for; an image is read as `open_source` reads it.

    Raises
    ------
    DataError
        If it is neither, or the inputs do not fit.
    """
    if path.suffix == ".npz":
        return _inputs(_loaded(path), path, image_shape)
    if path.suffix == ".npy":
        found = _loaded_array(path)
        single = found.shape == image_shape
        return _fitting(found[None] if single else found, path, image_shape)
    return _decoded([path], image_shape).numpy()


def _folder(
    root: Path, image_shape: ImageShape, class_names: Sequence[str]
) -> FolderSource:
    label_of = {name: label for label, name in enumerate(class_names)}
    folders = sorted(one for one in root.iterdir() if not one.name.startswith("."))
    _require_classes(root, folders, label_of)
    files = [
        (label_of[folder.name], path)
        for folder in folders
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    ]
    for _, path in files:
        if not path.is_file():
            raise DataError(f"{path} is a folder where an image is expected")
    return FolderSource(
        root,
        tuple(path.relative_to(root).as_posix() for _, path in files),
        torch.tensor([label for label, _ in files], dtype=torch.int64),
        image_shape,
    )


def _require_classes(
    root: Path, folders: Sequence[Path], label_of: Mapping[str, int]
) -> None:
    for path in folders:
        if not path.is_dir():
            raise DataError(
                f"{path} is a file where the folder of a class is expected: give a "
                f"folder as in {LAYOUT}"
            )
    unknown = [path.name for path in folders if path.name not in label_of]
    if unknown:
        raise DataError(
            f"{root} has folders of classes that the store does not know: "
            f"{', '.join(unknown)}; expected some of {', '.join(label_of)}. Rename "
            "them, or leave them out"
        )


def _arrays(path: Path, image_shape: ImageShape) -> ArraySource:
    arrays = _loaded(path)
    inputs = _inputs(arrays, path, image_shape)
    num_rows = len(inputs)
    labels = _column(arrays, "labels", "iu", path, num_rows)
    if labels is None:
        raise DataError(f"{path}: found no labels; expected {LAYOUT}")
    names = _column(arrays, "external_ids", "U", path, num_rows)
    arrivals = _column(arrays, "arrivals", "f", path, num_rows)
    return ArraySource(
        torch.from_numpy(inputs),
        torch.from_numpy(labels.astype(np.int64)),
        (None,) * num_rows if names is None else _without_empty(names),
        None if arrivals is None else torch.from_numpy(arrivals.astype(np.float64)),
    )


def _without_empty(names: Array) -> tuple[str | None, ...]:
    return tuple(str(name) or None for name in names.tolist())


def _inputs(
    arrays: Mapping[str, Array], path: Path, image_shape: ImageShape
) -> NDArray[np.uint8]:
    if "inputs" not in arrays:
        raise DataError(
            f"{path}: found no inputs (an export of a store that keeps none has none); "
            f"expected {LAYOUT}"
        )
    return _fitting(arrays["inputs"], path, image_shape)


def _fitting(inputs: Array, path: Path, shape: ImageShape) -> NDArray[np.uint8]:
    if inputs.dtype != np.uint8 or inputs.shape[1:] != shape:
        raise DataError(
            f"{path}: inputs: expected uint8 of shape (n, {', '.join(map(str, shape))})"
            f", found {inputs.dtype} of shape {inputs.shape}"
        )
    return inputs.astype(np.uint8, copy=False)


def _column(
    arrays: Mapping[str, Array], name: str, kinds: str, path: Path, num_rows: int
) -> Array | None:
    """Return an array of one value for each input; None where there is none."""
    found = arrays.get(name)
    if found is not None and (
        found.dtype.kind not in kinds or found.shape != (num_rows,)
    ):
        what = {"iu": "whole numbers", "U": "texts", "f": "seconds since 1970"}[kinds]
        raise DataError(
            f"{path}: {name}: expected {what} of shape ({num_rows},), found "
            f"{found.dtype} of shape {found.shape}"
        )
    return found


def _loaded(path: Path) -> dict[str, Array]:
    wanted = ("inputs", "labels", "external_ids", "arrivals")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in wanted if name in arrays}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as .npz: {error}") from error


def _loaded_array(path: Path) -> Array:
    try:
        found: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as .npy: {error}") from error
    return found


def _decoded(paths: Sequence[Path], image_shape: ImageShape) -> Tensor:
    height, width, channels = image_shape
    images = torch.empty((len(paths), *image_shape), dtype=torch.uint8)
    for row, path in enumerate(paths):
        pixels = read_image(path, channels, (height, width))
        images[row] = torch.from_numpy(pixels.copy())
    return images
