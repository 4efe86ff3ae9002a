"""Examples as arrays in one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datastore.core.arriving import require_arrivals
from datastore.validation import require_labels
from knnper.config.errors import DataError
from knnper.data.array_file import Array, load_array, load_arrays
from knnper.data.class_folders import ImageShape

NAMES = ("inputs", "labels", "external_ids", "arrivals", "class_names")


@dataclass(frozen=True)
class ArraySource:
    """Arrays of one file, in memory; see `datastore.care.sources.Source`."""

    inputs: Tensor
    labels: Tensor
    external_ids: tuple[str | None, ...]
    arrivals: Tensor | None
    num_ignored: int = 0

    def images(self, positions: Sequence[int]) -> Tensor:
        """See `datastore.care.sources.Source`."""
        return self.inputs[list(positions)]


def array_source(
    path: Path, image_shape: ImageShape, class_names: Sequence[str], num_classes: int
) -> ArraySource:
    """Return the examples in an .npz file; see `datastore.care.sources.open_source`.

    Raises
    ------
    DataError
        With the file, if an array is missing or does not fit.
    """
    arrays = load_arrays(path, NAMES)
    inputs = _inputs(arrays, path, image_shape)
    num_rows = len(inputs)
    names = _column(arrays, "external_ids", "U", path, num_rows)
    arrivals = _column(arrays, "arrivals", "f", path, num_rows)
    source = ArraySource(
        torch.from_numpy(inputs),
        torch.from_numpy(_labels(arrays, path, num_rows, class_names)),
        (None,) * num_rows if names is None else _without_empty(names),
        None if arrivals is None else torch.from_numpy(arrivals.astype(np.float64)),
    )
    try:
        require_labels(source.labels, num_rows, num_classes)
        if source.arrivals is not None:
            require_arrivals(source.arrivals, num_rows)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return source


def inputs_of(path: Path, image_shape: ImageShape) -> NDArray[np.uint8]:
    """Return the inputs in an .npz file, or in an .npy file of one or several.

    Raises
    ------
    DataError
        With the file, if they do not fit.
    """
    if path.suffix == ".npz":
        return _inputs(load_arrays(path, NAMES), path, image_shape)
    found = load_array(path)
    single = found.shape == image_shape
    return _fitting(found[None] if single else found, path, image_shape)


def _labels(
    arrays: Mapping[str, Array], path: Path, num_rows: int, class_names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the labels, by the names of their classes where the file has names."""
    found = _column(arrays, "labels", "iu", path, num_rows)
    if found is None:
        raise DataError(f"{path}: found no labels; expected an array of whole numbers")
    labels = found.astype(np.int64)
    names = [str(name) for name in arrays.get("class_names", np.empty(0)).ravel()]
    if not names or not class_names:
        return labels
    if num_rows and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{path}: labels: expected values in [0, {len(names)}), the positions in "
            f"its class_names, found {labels.min()} to {labels.max()}"
        )
    used = [names[label] for label in np.unique(labels).tolist()]
    unknown = [name for name in used if name not in class_names]
    if unknown:
        raise DataError(
            f"{path} has examples of classes that the store does not know: "
            f"{', '.join(unknown)}; expected some of {', '.join(class_names)}. Rename "
            "them in class_names, or leave them out"
        )
    label_of = {name: label for label, name in enumerate(class_names)}
    return np.array([label_of.get(name, -1) for name in names], np.int64)[labels]


def _without_empty(names: Array) -> tuple[str | None, ...]:
    return tuple(str(name) or None for name in names.tolist())


def _inputs(
    arrays: Mapping[str, Array], path: Path, image_shape: ImageShape
) -> NDArray[np.uint8]:
    if "inputs" not in arrays:
        raise DataError(
            f"{path}: found no inputs (an export of a store that keeps none has none); "
            "expected the arrays inputs and labels"
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
