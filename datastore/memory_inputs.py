"""Inputs of a `LocalMemory`: arrays, tables, tensors, data sets and loaders."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

INPUT_KEYS = (
    *("img", "image", "images", "pixel_values"),
    *("input", "inputs", "x", "X", "features", "data"),
)
"""Keys under which a batch that is a mapping may hold its inputs."""
LABEL_KEYS = ("label", "labels", "fine_label", "y", "target", "targets")
"""Keys under which it may hold its labels."""
FEWEST_STEPS = 1024
"""Steps of float32 in a column's standard deviation; fewer distort distances."""
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ROWS_AT_ONCE = 4096
_MISSING = ("NAType", "NaTType")  # of pandas, which need not be installed


@dataclass(frozen=True)
class VisitOrder:
    """The order in which a loader visits its data set.

    Attributes
    ----------
    kind
        ``as_stored``: position by position. ``random``: shuffled. ``unknown``: decided
        by code of the user's own.
    reason
        The part of the loader that decides the order; empty for ``as_stored``.
    """

    kind: Literal["as_stored", "random", "unknown"] = "as_stored"
    reason: str = ""


def loader_of(X: Any, batch_size: int) -> "DataLoader[Any] | None":
    """Return the loader of a data set, or X if it is one; None for other inputs."""
    if isinstance(X, DataLoader):
        return X
    if _is_hugging_face(X):
        X = _as_tensors(X)
    if isinstance(X, Dataset) or _is_hugging_face(X):
        return DataLoader(X, batch_size)
    if isinstance(X, Mapping):
        raise ValueError(
            f"X: found a {type(X).__name__} with the keys {_listed(X)}, expected an "
            "array, a tensor, a data set or a loader; give one of its values, and the "
            "labels as y"
        )
    return None


def _is_hugging_face(X: Any) -> bool:
    """Return whether X is a data set of the package ``datasets``."""
    module = type(X).__module__.partition(".")[0]
    return module == "datasets" and hasattr(X, "with_format") and hasattr(X, "features")


def _as_tensors(X: Any) -> Any:
    """Make a Hugging Face data set return tensors, unless it has a transform."""
    is_transformed = getattr(X, "format", {"type": None})["type"] == "custom"
    return X if is_transformed else X.with_format("torch")


def order_of(X: Any) -> VisitOrder:
    """Return the order in which a loader visits its data set."""
    dataset = X.dataset if isinstance(X, DataLoader) else X
    if isinstance(dataset, IterableDataset):
        return VisitOrder("unknown", f"the IterableDataset {type(dataset).__name__}")
    return _order_of_loader(X) if isinstance(X, DataLoader) else VisitOrder()


def _order_of_loader(loader: "DataLoader[Any]") -> VisitOrder:
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return VisitOrder("random", "in_order=False")
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None:
        # A user's own batch sampler may have a sampler that the loader does not know.
        if type(loader.batch_sampler) is not BatchSampler:
            name = type(loader.batch_sampler).__name__
            return VisitOrder("unknown", f"the batch_sampler {name}")
        sampler = loader.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return VisitOrder()
    reason = f"the sampler {type(sampler).__name__}"
    shuffles = isinstance(sampler, _SHUFFLING) or (
        isinstance(sampler, DistributedSampler) and sampler.shuffle
    )
    return VisitOrder("random" if shuffles else "unknown", reason)


def num_dropped(loader: "DataLoader[Any]") -> int:
    """Return the number of examples that ``drop_last`` drops; 0 if unknown."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or not batches.drop_last:
        return 0
    with contextlib.suppress(TypeError):  # a sampler without a length
        return len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
    return 0


def require_stored_order(X: Any, **matched: Any) -> None:
    """Raise ValueError if arguments cannot be matched to the inputs by position."""
    order = order_of(X)
    argument = next((name for name in matched if matched[name] is not None), None)
    if argument is not None and order.kind != "as_stored":
        raise ValueError(
            f"{argument}: cannot be matched to the inputs, since {order.reason} "
            "decides their order; give the data set itself, or a DataLoader with "
            "shuffle=False"
        )


def require_predictable(X: Any) -> None:
    """Raise or warn if the caller cannot know the order of the predictions."""
    order = order_of(X)
    if order.kind == "random":
        raise ValueError(
            f"X: found a loader that shuffles ({order.reason}): predictions could not "
            "be matched to the data set. Give the data set itself, or a DataLoader "
            "with shuffle=False; score takes a loader that shuffles"
        )
    if order.kind == "unknown":
        warnings.warn(
            f"X: {order.reason} decides the order of the inputs; the predictions are "
            "in that order",
            stacklevel=2,
        )


def batches_of(loader: "DataLoader[Any]") -> Iterator[tuple[Any, Any]]:
    """Yield inputs and labels (None without) of each batch of a loader."""
    if left_out := num_dropped(loader):
        warnings.warn(
            f"X: drop_last leaves out the last {left_out} examples of the loader; set "
            "drop_last=False to have them",
            stacklevel=2,
        )
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except TypeError as error:
            if "collate" not in str(error):
                raise
            raise ValueError(
                f"X: its items cannot be joined to a batch ({error}); give the data "
                "set a transform that returns tensors, such as ToTensor"
            ) from error
        inputs, labels = _pair(batch)
        if isinstance(inputs, list | tuple):
            # torch collates items of p numbers each to a list of p tensors (n,).
            raise ValueError(
                f"X: found inputs in {len(inputs)} parts, expected one tensor a batch; "
                'for a data set of Hugging Face, give ds.with_format("torch")'
            )
        if labels is not None and np.ndim(as_array(labels, "y")) == 0:
            raise ValueError(
                "X: found a loader that gives one example at a time, expected batches; "
                "set its batch_size"
            )
        yield inputs, labels


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch: a mapping, a sequence or inputs alone."""
    if isinstance(batch, Mapping):
        return _pair_of_mapping(batch)
    if isinstance(batch, list | tuple):
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def _pair_of_mapping(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    label_keys = [key for key in LABEL_KEYS if key in batch]
    others = [key for key in batch if key not in LABEL_KEYS]
    input_keys = [key for key in INPUT_KEYS if key in batch]
    if not input_keys and len(others) == 1:
        input_keys = others
    if len(input_keys) != 1 or len(label_keys) > 1:
        raise ValueError(
            f"X: found batches with the keys {_listed(batch)}, expected inputs under "
            f"exactly one of {', '.join(INPUT_KEYS)}, and labels under at most one of "
            f"{', '.join(LABEL_KEYS)}. Rename or remove columns, or let a collate_fn "
            "return pairs; give a table with one column a feature as a DataFrame"
        )
    return batch[input_keys[0]], batch[label_keys[0]] if label_keys else None


def _listed(mapping: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, mapping))


def with_column_names(X: Any) -> Any:
    """Rename the columns of a table to text; return any other input unchanged.

    scikit-learn compares names only if they are text. Columns that pandas has numbered
    from 0 have no names.
    """
    columns = getattr(X, "columns", None)
    if columns is None or not hasattr(X, "set_axis"):
        return X
    for name, dtype in X.dtypes.items():
        if getattr(dtype, "kind", "") in "mM":
            raise ValueError(
                f"X: the column {name} holds {dtype}, expected numbers; give seconds "
                "since some day, or the parts that matter, such as the hour"
            )
    labels = list(columns)
    if any(isinstance(label, str) for label in labels) or labels == [
        *range(len(labels))
    ]:
        return X
    return X.set_axis([str(label) for label in labels], axis=1)


def as_array(values: Any, argument: str = "X") -> Any:
    """Convert a tensor to an array and refuse masked values; pass on other inputs."""
    if np.ma.isMaskedArray(values):
        if count := int(np.ma.getmaskarray(values).sum()):
            raise ValueError(
                f"{argument}: found an array with {count} masked values, expected "
                "none; fill them in, or leave their rows out"
            )
        return np.ma.getdata(values)
    if not isinstance(values, Tensor):
        return values
    plain = values.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.dtype == torch.bfloat16:  # which NumPy lacks
        plain = plain.float()
    return plain.resolve_conj().resolve_neg().numpy()


def require_numbers(array: NDArray[Any]) -> None:
    """Raise ValueError for arrays of times, texts and objects."""
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"X: found {array.dtype}, expected numbers; convert them, as in "
            "X.astype(float)"
        )


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Convert an array of any layout, byte order and numeric type to a tensor."""
    require_numbers(array)
    kind, size = array.dtype.kind, array.dtype.itemsize
    dtype = array.dtype.newbyteorder("=")
    if kind == "f" and size > np.dtype(np.float64).itemsize:
        dtype = np.dtype(np.float64)
    elif kind == "u" and size > 1:
        # torch has these types, but supports few operations on them.
        dtype = np.dtype(np.int64)
        if array.size and array.max() > np.iinfo(dtype).max:
            raise ValueError(f"X: found {array.max()}, expected numbers below 2^63")
    return torch.from_numpy(np.require(array, dtype, ["C", "W", "A"]))


def coarse_columns(
    exact: NDArray[Any], rounded: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Return the mask of columns with differences too small for float32, bool (p,).

    Both arguments are of shape (n, p). An example is a column of times in seconds since
    1970.
    """
    if np.can_cast(exact.dtype, np.float32):
        return np.zeros(exact.shape[1], dtype=np.bool_)
    largest_error = np.zeros(exact.shape[1])
    for start in range(0, len(exact), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        errors = np.abs(exact[rows].astype(np.float64) - rounded[rows])
        np.maximum(largest_error, errors.max(axis=0), out=largest_error)
    spread = exact.astype(np.float64, copy=False).std(axis=0)
    coarse: NDArray[np.bool_] = largest_error * FEWEST_STEPS > spread
    return coarse


def middle_values(columns: NDArray[Any]) -> NDArray[np.float64]:
    """Return the (upper) median of each column, (p,)."""
    middle = len(columns) // 2
    values: NDArray[np.float64] = np.partition(columns, middle, axis=0)[middle].astype(
        np.float64
    )
    return values


def as_labels(labels: ArrayLike | Tensor) -> Any:
    """Convert labels for scikit-learn; raise ValueError for a missing label."""
    values = as_array(labels, "y")
    if hasattr(values, "to_numpy"):  # a column of a table, maybe of a nullable type
        values = values.to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuUS":
        return values
    listed = values.ravel().tolist() if isinstance(values, np.ndarray) else values
    for row, label in enumerate(listed if isinstance(listed, list | tuple) else ()):
        if is_missing(label):
            raise ValueError(
                f"y: found {label} as the label of row {row}, expected a label for "
                "each input; leave out the inputs without one"
            )
    return values


def is_missing(value: Any) -> bool:
    """Return whether a value stands for a missing one, such as None or NaN."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in _MISSING


def listed_names(names: Any) -> tuple[str | None, ...]:
    """Return names as strings, None for missing names."""
    if isinstance(names, str | bytes):
        raise ValueError(
            f"names: found the text {names!r}, expected a sequence of names; put it "
            "into a list"
        )
    listed = names.tolist() if hasattr(names, "tolist") else list(names)
    for row, name in enumerate(listed):
        if not isinstance(name, str) and not is_missing(name):
            raise ValueError(
                f"names: found {name!r} ({type(name).__name__}) in row {row}, "
                "expected a text, or None; give list(map(str, names))"
            )
    return tuple(None if is_missing(name) else name for name in listed)
