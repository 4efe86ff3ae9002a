"""Random changes to training images: mirroring and cropping."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import KINDS_OF_INPUT, InputDtype, InputSpec
from knnper.errors import ConfigError, Problem
from knnper.experiment import Augmentation

FRAME = 4
"""Largest shift of a crop in pixels; see `frame_of` for smaller images."""


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror the images selected by ``mirrored``, bool (n,), left to right."""
    return torch.where(mirrored[:, None, None, None], images.flip(2), images)


def crop(images: Tensor, tops: Tensor, lefts: Tensor) -> Tensor:
    """Pad each image with a black frame and crop it to its original size.

    ``tops`` and ``lefts``, int64 of shape (n,), are the first row and column of each
    crop in the padded image: 0 to twice the width of the frame, see `frame_of`.
    """
    num_images, height, width, _ = images.shape
    rows, columns = frame_of(height), frame_of(width)
    framed = functional.pad(images, (0, 0, columns, columns, rows, rows))
    # A view of all possible crops; only the selected crops are copied.
    crops = framed.unfold(1, height, 1).unfold(2, width, 1)
    which = torch.arange(num_images, device=images.device)
    return crops[which, tops, lefts].permute(0, 2, 3, 1)


def frame_of(length: int) -> int:
    """Return the width of the black frame on a side of ``length`` pixels."""
    return min(FRAME, length - 1)


def require_augmentable(augmentation: Augmentation, spec: InputSpec) -> None:
    """Raise a `ConfigError` if the inputs are not images and cannot be augmented."""
    problems = list(augmentation_problems(augmentation, spec.dtype))
    if problems:
        raise ConfigError(problems)


def augmentation_problems(
    augmentation: Augmentation, dtype: InputDtype
) -> Iterator[Problem]:
    """Yield the problem of an augmentation that inputs of this type do not have."""
    if dtype != "uint8" and augmentation != "none":
        message = (
            f"found {augmentation!r}, but the inputs are {KINDS_OF_INPUT[dtype]}, "
            "which cannot be flipped or cropped; expected 'none'"
        )
        yield Problem("training.augmentation", message)


def _random_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    mirrored = generator.integers(0, 2, len(images)).astype(bool)
    return flip(images, torch.from_numpy(mirrored).to(images.device))


def _random_crop_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    num_images, height, width, _ = images.shape
    tops, lefts = (
        torch.from_numpy(generator.integers(0, 2 * frame_of(side) + 1, num_images))
        for side in (height, width)
    )
    cropped = crop(images, tops.to(images.device), lefts.to(images.device))
    return _random_flip(cropped, generator)


AUGMENTATIONS: Mapping[
    Augmentation, Callable[[Tensor, np.random.Generator], Tensor]
] = {
    "none": lambda images, generator: images,  # noqa: ARG005
    "flip": _random_flip,
    "crop_flip": _random_crop_flip,
}
"""Augmentations ``(images, generator) -> images`` by name.

Images are uint8 of shape (n, height, width, channels) on any device. All random
choices come from the generator.
"""
