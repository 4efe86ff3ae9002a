"""What goes into a store, how parts of it are named, and what comes of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datastore.contents import Ids

InputType = Literal["uint8", "float32", "int64"]

_TORCH_TYPES: Mapping[InputType, torch.dtype] = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class InputLayout:
    """How one raw input is laid out.

    Attributes
    ----------
    shape
        Of one input, as in (32, 32, 3) of an image.
    dtype
        A name of `InputType`.
    """

    shape: tuple[int, ...]
    dtype: InputType = "uint8"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch names it."""
        return _TORCH_TYPES[self.dtype]


@dataclass(frozen=True)
class StoreSpec:
    """What a store is made for; fixed when it is created.

    Attributes
    ----------
    num_classes
        c, the number of labels.
    input
        Layout of a raw input; None keeps no inputs, and such a store cannot be
        embedded anew by another model.
    class_names
        One for each label, or none.
    """

    num_classes: int
    input: InputLayout | None = None
    class_names: tuple[str, ...] = ()

    @property
    def input_bytes(self) -> int:
        """Bytes of one raw input; 0 where none are kept."""
        if self.input is None:
            return 0
        return math.prod(self.input.shape) * self.input.torch_dtype.itemsize


@dataclass(frozen=True)
class NewExamples:
    """Examples that arrive, in order.

    Attributes
    ----------
    embeddings
        φ(x), float32 of shape (n, p).
    labels
        int64, shape (n,), in [0, c).
    inputs
        x as the store's `InputLayout` says, shape (n, ...); None where it keeps none.
    external_ids
        The names that the owner of the data uses, unique in the store; None for an
        example, or for all, that has none.
    arrivals
        Seconds since 1970 (UTC), float64 of shape (n,); None is now.
    """

    embeddings: Tensor
    labels: Tensor
    inputs: Tensor | None = None
    external_ids: tuple[str | None, ...] | None = None
    arrivals: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True)
class Selection:
    """Stored examples that all of these describe; nothing given describes all.

    Attributes
    ----------
    ids, external_ids, labels
        One of these; None leaves it open.
    arrived_from, arrived_before
        Seconds since 1970 (UTC): arrival in [from, before); None leaves an end open.
    """

    ids: tuple[int, ...] | None = None
    external_ids: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None
    arrived_from: float | None = None
    arrived_before: float | None = None


@dataclass(frozen=True)
class Added:
    """What became of a batch.

    Attributes
    ----------
    ids
        The id of each example of the batch, int64 of shape (n,); -1 where the policy
        did not keep it.
    evicted
        Ids that made room, int64.
    """

    ids: Ids
    evicted: Ids
