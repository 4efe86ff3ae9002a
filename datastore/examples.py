"""Examples for a store, how they are selected, and the outcome of adding them."""

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


@dataclass(frozen=True)
class Contents:
    """n stored examples, ascending by id; all of shape (n,)."""

    ids: Ids  # given in the order of storing, and never given again
    labels: NDArray[np.int64]
    arrivals: NDArray[np.float64]  # seconds since 1970 (UTC)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """How many are of each label, up to the largest that is there."""
        return np.bincount(self.labels)

    def positions(self, ids: Ids) -> NDArray[np.intp]:
        """Return where ``ids``, all of which are stored, stand; the same shape."""
        return np.searchsorted(self.ids, ids)

    def followed_by(self, later: "Contents") -> "Contents":
        """Return these examples and then ``later``, whose ids are all larger."""
        return Contents(
            np.concatenate([self.ids, later.ids]),
            np.concatenate([self.labels, later.labels]),
            np.concatenate([self.arrivals, later.arrivals]),
        )

    def without(self, ids: Ids) -> "Contents":
        """Return these examples less ``ids``, all of which are stored."""
        kept = np.ones(len(self), dtype=bool)
        kept[self.positions(ids)] = False
        return self.take(kept)

    def take(self, chosen: NDArray[np.bool_]) -> "Contents":
        """Return the examples that ``chosen``, bool of shape (n,), marks."""
        return Contents(self.ids[chosen], self.labels[chosen], self.arrivals[chosen])


def no_contents() -> Contents:
    """Return what an empty store holds."""
    return Contents(
        np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)
    )


@dataclass(frozen=True)
class StreamState:
    """What a policy remembers of the examples that came by."""

    # Examples that ever arrived, stored or not. It only grows: the random choices about
    # an example derive from its number.
    num_offered: int
    # Of each label, the examples that arrived and were not deleted since, shape (c,).
    # What a policy evicted stays counted; what a user deleted does not.
    num_seen: NDArray[np.int64]
    # Labels that had the most examples in a full store since they last lost one to a
    # deletion, shape (c,).
    was_largest: NDArray[np.bool_]

    @classmethod
    def start(cls, num_classes: int) -> "StreamState":
        """Return the state before the first example."""
        return cls(0, np.zeros(num_classes, np.int64), np.zeros(num_classes, np.bool_))


InputType = Literal["uint8", "float32", "int32", "int64"]


@dataclass(frozen=True)
class InputLayout:
    """How one raw input is laid out."""

    shape: tuple[int, ...]  # of one input, as in (32, 32, 3) of an image
    dtype: InputType = "uint8"  # a name of `InputType`

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch names it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class StoreSpec:
    """What a store is made for; fixed when it is created."""

    num_classes: int  # c, the number of labels
    # layout of a raw input; None keeps no inputs, and such a store cannot be embedded
    # anew by another model
    input: InputLayout | None = None
    class_names: tuple[str, ...] = ()  # one for each label, or none

    @property
    def input_bytes(self) -> int:
        """Bytes of one raw input; 0 where none are kept."""
        if self.input is None:
            return 0
        return math.prod(self.input.shape) * self.input.torch_dtype.itemsize


@dataclass(frozen=True)
class NewExamples:
    """Examples that arrive, in order."""

    embeddings: Tensor  # φ(x), float32 of shape (n, p)
    labels: Tensor  # int64, shape (n,), in [0, c)
    # x as the store's `InputLayout` says, shape (n, ...); None where it keeps none
    inputs: Tensor | None = None
    # the names that the owner of the data uses, unique in the store; None for an
    # example, or for all, that has none
    external_ids: tuple[str | None, ...] | None = None
    # seconds since 1970 (UTC), float64 of shape (n,); None is now
    arrivals: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True)
class Selection:
    """Stored examples that all of these describe; nothing given describes all."""

    # ids, external_ids, labels: one of these; None leaves it open
    ids: tuple[int, ...] | None = None
    external_ids: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None
    # arrived_from, arrived_before: seconds since 1970 (UTC): arrival in [from, before);
    # None leaves an end open
    arrived_from: float | None = None
    arrived_before: float | None = None


@dataclass(frozen=True)
class Added:
    """What became of a batch."""

    # the id of each example of the batch, int64 of shape (n,); -1 where the policy did
    # not keep it
    ids: Ids
    evicted: Ids  # ids that made room, int64


SHOWN = 10
"""So many ids of what is wrong are named."""


class StoreError(KnnPerError):
    """A store cannot do what it was asked; it holds what it held before."""

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
    """The store's files are not what was written."""

    # the problem alone, without its fix; empty if the message has no such part
    problem: str = ""


class ExamplesMissingError(StoreDamagedError):
    """Examples that were asked for are not there, or no longer."""


def named(ids: Sequence[object]) -> str:
    """Return the first ids as text."""
    more = ", ..." if len(ids) > SHOWN else ""
    return ", ".join(map(str, ids[:SHOWN])) + more


def to_restore(folder: Path) -> str:
    """Return how to mend what is damaged beyond single examples."""
    return (
        "restore the whole folder from a backup, or copy the intact examples: knnper "
        f"store rewrite {folder} --to NEW_FOLDER"
    )


def to_delete(folder: Path, ids: Sequence[object]) -> str:
    """Return how to mend a store of which these examples are damaged."""
    options = " ".join(f"--id {one}" for one in ids[:SHOWN])
    more = " and so on" if len(ids) > SHOWN else ""
    return (
        "restore the folder from a backup, or delete them: knnper store delete "
        f"{folder} {options}{more}"
    )


@dataclass(frozen=True)
class Neighbors:
    """The nearest stored examples of m queries, nearest first; k' = min(k, n)."""

    squared_distances: Tensor  # squared Euclidean distances, float64 of shape (m, k')
    labels: Tensor  # int64, shape (m, k')
    # In the store, int64 of shape (m, k'). Of two examples at the same distance the one
    # with the smaller id comes first.
    ids: Tensor


_TOLERANCE = 1e-4  # far above float32's rounding, far below what logits differ by


def require_embeddings(
    what: str, embeddings: Tensor, embedding_dim: int | None = None
) -> None:
    """Refuse anything but finite float32 of shape (n, p); None takes any p."""
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or embeddings.dtype != torch.float32:
        raise DataError(
            f"{what}: expected float32 of shape (n, p), found {embeddings.dtype} of "
            f"shape {shape}"
        )
    if embedding_dim is not None and shape[1] != embedding_dim:
        raise DataError(
            f"{what}: expected {embedding_dim} numbers in a row, as in the store, "
            f"found {shape[1]}; embed them with the model that filled the store"
        )
    rows = embeddings.detach().numpy()
    finite = np.isfinite(rows)
    if not finite.all():
        raise DataError(
            f"{what}: expected finite numbers, found NaN or infinity in row "
            f"{int((~finite.all(axis=1)).argmax())}; the model that embedded it has "
            "diverged or its input is not a valid image"
        )


def require_labels(labels: Tensor, num_rows: int, num_classes: int) -> None:
    """Refuse anything but int64 of shape (num_rows,) with values in [0, c)."""
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


def require_probabilities(what: str, probabilities: Tensor) -> None:
    """Refuse anything but (n, c) with values in [0, 1] and rows that sum to 1."""
    if probabilities.dim() != 2:
        raise ValueError(
            f"{what}: expected probabilities of shape (n, c), found shape "
            f"{tuple(probabilities.shape)}"
        )
    rows = probabilities.detach().numpy()  # of few rows, several times faster
    sums_to_one = abs(rows.sum(axis=1) - 1) <= _TOLERANCE
    valid = sums_to_one & (rows.min(axis=1, initial=0.0) >= 0)
    if not valid.all():
        row = int(valid.argmin())
        raise ValueError(
            f"{what}: expected probabilities, found {probabilities[row].tolist()} in "
            f"row {row}; pass logits through a softmax first"
        )
