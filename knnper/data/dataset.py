"""A data set: images on disc shared by all processes, and what is known of them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from knnper.data.examples import Examples, InputSpec


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """One split of a data set, read-only.

    Attributes
    ----------
    images
        Shape (n, height, width, channels), of the type that the spec says; images
        (uint8) are memory-mapped.
    labels
        int64, shape (n,).
    client_ids
        int64, shape (n,): who each image belongs to, where the data set says so.
    domain_ids
        int64, shape (n,): which domain each image is from, where the data set says so.
    """

    images: NDArray[np.uint8 | np.float32]
    labels: NDArray[np.int64]
    client_ids: NDArray[np.int64] | None = None
    domain_ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def examples_at(self, indices: NDArray[np.int64]) -> Examples:
        """Return copies of the examples at ``indices``, int64 of shape (m,)."""
        return Examples(
            torch.from_numpy(np.array(self.images[indices])),
            torch.from_numpy(np.array(self.labels[indices])),
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A central data set, before it is dealt to clients.

    Attributes
    ----------
    name
        The name in the catalogue.
    train, test
        The two official splits.
    spec
        What a model must know about the data.
    class_names
        One for each of the ``spec.num_classes`` labels.
    coarse_of
        For each label, the coarse label it belongs to (CIFAR-100's superclasses);
        None where the data set has one level of labels.
    feature_names
        For rows of features, what each of them is called.
    domain_names
        One for each of the domains that the images are from; empty where the data set
        says nothing of them.
    """

    name: str
    train: LabelledArrays
    test: LabelledArrays
    spec: InputSpec
    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None = None
    feature_names: tuple[str, ...] = ()
    domain_names: tuple[str, ...] = ()
