"""Where a client's examples come from: a folder of images, or arrays in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from datastore.care.array_source import array_source, inputs_of
from datastore.care.folder_source import folder_source
from knnper.config.errors import DataError
from knnper.data.class_folders import ImageShape, decoded

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
    num_ignored
        Files beside them that are no images by their names.
    """

    @property
    def labels(self) -> Tensor: ...  # noqa: D102

    @property
    def external_ids(self) -> Sequence[str | None]: ...  # noqa: D102

    @property
    def arrivals(self) -> Tensor | None: ...  # noqa: D102

    @property
    def num_ignored(self) -> int: ...  # noqa: D102

    def images(self, positions: Sequence[int]) -> Tensor:
        """Return uint8 of shape (m, height, width, channels)."""


def open_source(
    path: Path,
    image_shape: ImageShape,
    class_names: Sequence[str],
    num_classes: int | None = None,
) -> Source:
    """Return the examples in ``path``: SOURCE/CLASS/IMAGE, or an .npz file.

    Parameters
    ----------
    path
        A folder with one folder of images for each class, or a file with ``inputs``
        (uint8, (n, height, width, channels)), ``labels`` (n,) and optionally
        ``external_ids`` (n,), where an empty text is none, ``arrivals`` (n,), and
        ``class_names``, by which labels are then found in the store.
    image_shape
        What the store was made for.
    class_names
        One for each label, or none.
    num_classes
        c; by default as many as there are names.

    Raises
    ------
    DataError
        If it is neither, is empty, has unknown classes, or does not fit.
    """
    if path.is_dir():
        found: Source = folder_source(path, image_shape, class_names)
    elif not path.exists():
        raise DataError(f"{path}: there is no such file or folder; give {LAYOUT}")
    elif path.suffix == ".npz":
        count = len(class_names) if num_classes is None else num_classes
        found = array_source(path, image_shape, class_names, count)
    else:
        raise DataError(
            f"{path}: found neither a folder nor a file .npz; give {LAYOUT}"
        )
    if len(found.external_ids) == 0:
        raise DataError(f"{path}: found no examples; give {LAYOUT}")
    return found


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
        If it is neither, holds none, or the inputs do not fit.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix not in (".npz", ".npy"):
        return decoded([path], image_shape).numpy()
    found = inputs_of(path, image_shape)
    if len(found) == 0:
        raise DataError(f"{path}: found no inputs in it, expected at least one")
    return found
