"""Types of stored and new examples, of selections and neighbours; errors of a store."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.errors import DataError, KnnPerError
from knnper.reasons import Code, SafeReason

Ids = NDArray[np.int64]
InputType = Literal["uint8", "float32", "int32", "int64"]

# Ids that a message names at most.
SHOWN = 10
# Tolerance of sums of probabilities: far above the rounding of float32, far below the
# deviation of logits.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Contents:
    """n stored examples, ascending by id; all of shape (n,)."""

    ids: Ids  # ascend in the order of arrival, and are never used again
    labels: NDArray[np.int64]
    arrivals: NDArray[np.float64]  # seconds since 1970 (UTC)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """The number of examples of each label, up to the largest stored label."""
        return np.bincount(self.labels)

    def positions(self, ids: Ids) -> NDArray[np.intp]:
        """Return the positions of stored ``ids``, in the same shape."""
        return self.ids.searchsorted(ids)

    def followed_by(self, later: "Contents") -> "Contents":
        """Append the examples ``later``, which have larger ids."""
        return Contents(
            np.concatenate([self.ids, later.ids]),
            np.concatenate([self.labels, later.labels]),
            np.concatenate([self.arrivals, later.arrivals]),
        )

    def without(self, ids: Ids) -> "Contents":
        """Remove the stored examples ``ids``."""
        is_left = np.ones(len(self), dtype=bool)
        is_left[self.positions(ids)] = False
        return self.take(is_left)

    def take(self, chosen: NDArray[np.bool_]) -> "Contents":
        """Return the examples where ``chosen``, bool of shape (n,), is true."""
        return Contents(self.ids[chosen], self.labels[chosen], self.arrivals[chosen])


def no_contents() -> Contents:
    """Return the contents of an empty store."""
    return Contents(
        np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)
    )


@dataclass(frozen=True)
class StreamState:
    """The state of an eviction policy: counts of the examples that arrived."""

    # Examples that ever arrived, stored or not. Never decreases: the random choices
    # about an example derive from its number.
    num_offered: int
    # Number of examples of each label that arrived, shape (c,): without those that a
    # user deleted, but with those that the policy evicted.
    num_seen: NDArray[np.int64]
    # Whether a label had the most examples in a full store since a user last deleted
    # one of its examples, shape (c,).
    was_largest: NDArray[np.bool_]

    @classmethod
    def start(cls, num_classes: int) -> "StreamState":
        """Return the state before the first example."""
        return cls(0, np.zeros(num_classes, np.int64), np.zeros(num_classes, np.bool_))


@dataclass(frozen=True)
class InputLayout:
    """The shape and type of a raw input."""

    shape: tuple[int, ...]  # of one input, such as (32, 32, 3) for an image
    dtype: InputType = "uint8"  # a name of `InputType`

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch names it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class StoreSpec:
    """The classes and inputs of a store; fixed when it is created."""

    num_classes: int  # c, the number of labels
    # layout of a raw input; None keeps no inputs, and such a store cannot be
    # re-embedded by another model
    input: InputLayout | None = None
    class_names: tuple[str, ...] = ()  # for each label, or empty

    @property
    def input_bytes(self) -> int:
        """Bytes of a raw input; 0 if the store keeps no inputs."""
        if self.input is None:
            return 0
        return math.prod(self.input.shape) * self.input.torch_dtype.itemsize


@dataclass(frozen=True)
class NewExamples:
    """Examples that arrive, in order."""

    embeddings: Tensor  # φ(x), float32 of shape (n, p)
    labels: Tensor  # int64, shape (n,), in [0, c)
    # x in the store's `InputLayout`, shape (n, ...); None if it keeps no inputs
    inputs: Tensor | None = None
    # the owner's names of the examples, unique in the store; None for an example
    # without a name, or if no example has one
    external_ids: tuple[str | None, ...] | None = None
    # seconds since 1970 (UTC), float64 of shape (n,); None is the current time
    arrivals: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True)
class Selection:
    """Conditions on stored examples, combined by "and"; None is no condition."""

    ids: tuple[int, ...] | None = None
    external_ids: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None
    # arrival in [arrived_from, arrived_before), seconds since 1970 (UTC)
    arrived_from: float | None = None
    arrived_before: float | None = None


@dataclass(frozen=True)
class Added:
    """The outcome of adding a batch of n examples."""

    # id of each example, int64 of shape (n,); -1 if the policy did not keep it
    ids: Ids
    evicted: Ids  # ids of older examples that were evicted, int64


class StoreError(KnnPerError):
    """An operation on a store failed and changed nothing."""

    reasons = (SafeReason(Code.UNUSABLE_MEMORY),)


class StoreFullError(StoreError):
    """An example does not fit: capacity, budget or the disk is exhausted."""


class StoreBusyError(StoreError):
    """Another process writes to the store."""


class NotErasedError(StoreError):
    """Examples are deleted, but their bytes may still be in a file."""


class StoreMismatchError(StoreError):
    """The store was embedded by another model."""


class StoreDamagedError(StoreError):
    """The store's files are damaged."""

    # the problem alone, without its fix; empty if the message has no such part
    problem: str = ""


class ExamplesMissingError(StoreDamagedError):
    """Examples that are read were deleted, or never stored."""


def named(ids: Sequence[object]) -> str:
    """Format the first `SHOWN` ids."""
    ellipsis = ", ..." if len(ids) > SHOWN else ""
    return ", ".join(map(str, ids[:SHOWN])) + ellipsis


def to_restore(folder: Path) -> str:
    """Describe the fix of damage beyond single examples."""
    return (
        "restore the whole folder from a backup, or copy the intact examples: knnper "
        f"store rewrite {folder} --to NEW_FOLDER"
    )


def to_delete(folder: Path, ids: Sequence[object]) -> str:
    """Describe the fix of a store with these damaged examples."""
    options = " ".join(f"--id {example}" for example in ids[:SHOWN])
    ellipsis = " and so on" if len(ids) > SHOWN else ""
    return (
        "restore the folder from a backup, or delete them: knnper store delete "
        f"{folder} {options}{ellipsis}"
    )


@dataclass(frozen=True)
class Neighbors:
    """The nearest stored examples of m queries, nearest first; k' = min(k, n)."""

    squared_distances: Tensor  # squared Euclidean distances, float64 of shape (m, k')
    labels: Tensor  # int64, shape (m, k')
    # In the store, int64 of shape (m, k'). Examples at the same distance are ordered by
    # id.
    ids: Tensor
    contents: Contents  # the n examples of the store at the moment of the search
    fingerprint: str = ""  # of the model that embedded them
    # The owner's names, m rows of k' with None for an unnamed example; empty unless
    # the search was asked for them.
    names: Sequence[Sequence[str | None]] = ()


def require_embeddings(
    subject: str, embeddings: Tensor, embedding_dim: int | None = None
) -> None:
    """Reject anything but finite float32 of shape (n, p); None takes any p."""
    if embeddings.dim() != 2 or embeddings.dtype != torch.float32:
        raise DataError(
            f"{subject}: expected float32 of shape (n, p), found {embeddings.dtype} of "
            f"shape {tuple(embeddings.shape)}"
        )
    if embedding_dim is not None and embeddings.shape[1] != embedding_dim:
        raise DataError(
            f"{subject}: expected {embedding_dim} numbers in a row, as in the store, "
            f"found {embeddings.shape[1]}; embed them with the model that filled the "
            "store"
        )
    is_finite = np.isfinite(embeddings.detach().numpy())
    if not is_finite.all():
        raise DataError(
            f"{subject}: expected finite numbers, found NaN or infinity in row "
            f"{int((~is_finite.all(axis=1)).argmax())}; the model that embedded it has "
            "diverged or its input is not a valid image"
        )


def require_labels(labels: Tensor, num_rows: int, num_classes: int) -> None:
    """Reject anything but int64 of shape (num_rows,) with values in [0, c)."""
    shape = tuple(labels.shape)
    if shape != (num_rows,) or labels.dtype != torch.int64:
        raise DataError(
            f"labels: expected int64 of shape ({num_rows},), one for each embedding, "
            f"found {labels.dtype} of shape {shape}"
        )
    valid = (labels >= 0) & (labels < num_classes)
    if not bool(valid.all()):
        row = int((~valid).nonzero()[0])
        raise DataError(
            f"labels: expected values in [0, {num_classes}), found {int(labels[row])} "
            f"in row {row}; correct the number of classes or the label"
        )


def require_probabilities(subject: str, probabilities: Tensor) -> None:
    """Reject anything but (n, c) with values in [0, 1] and rows that sum to 1."""
    if probabilities.dim() != 2:
        raise ValueError(
            f"{subject}: expected probabilities of shape (n, c), found shape "
            f"{tuple(probabilities.shape)}"
        )
    rows = probabilities.detach().numpy()  # of few rows, several times faster
    sums_to_one = abs(rows.sum(axis=1) - 1) <= _TOLERANCE
    valid = sums_to_one & (rows.min(axis=1, initial=0.0) >= 0)
    if not valid.all():
        row = int(valid.argmin())
        raise ValueError(
            f"{subject}: expected probabilities, found {probabilities[row].tolist()} "
            f"in row {row}; pass logits through a softmax first"
        )
