"""Mean and deviation of a data set, and the inputs that models take."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.examples import TEXTS, InputSpec
from knnper.errors import DataError

_PIXELS_AT_ONCE = 2**20


def channel_statistics(
    parts: Iterable[NDArray[np.uint8]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel of pixels scaled to [0, 1].

    ``parts`` are batches of images, uint8 of shape (n, height, width, channels). The
    histograms are exact, so the result does not depend on the batches. A constant
    channel gets a standard deviation of 1, since inputs are divided by it.
    """
    histograms = np.sum([_histograms(part) for part in parts], axis=0)
    weights = histograms / histograms.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255.0
    means = weights @ values
    variances = (weights * (values - means[:, None]) ** 2).sum(axis=1)
    constant = np.count_nonzero(histograms, axis=1) == 1
    deviations = np.where(constant, 1.0, np.sqrt(variances))
    return tuple(means.tolist()), tuple(deviations.tolist())


def statistics_of(
    images: NDArray[Any],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel in the unit of `InputSpec`."""
    if images.dtype == np.uint8:
        return channel_statistics([images])
    return real_statistics([images])


def real_statistics(
    parts: Iterable[NDArray[np.float32]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel of float32 inputs.

    ``parts`` are batches of shape (n, height, width, channels). A constant channel gets
    a standard deviation of 1.
    """
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    smallest, largest = np.full(1, np.inf), np.full(1, -np.inf)
    for part in parts:
        rows = part.reshape(-1, part.shape[-1]).astype(np.float64)
        # Merge sums of squared deviations (Chan, Golub and LeVeque 1979).
        apart = rows.sum(axis=0) / len(rows) - total / max(count, 1)
        both = count + len(rows)
        squares = squares + ((rows - rows.mean(axis=0)) ** 2).sum(axis=0)
        squares = squares + apart**2 * count * len(rows) / both
        count, total = both, total + rows.sum(axis=0)
        smallest = np.minimum(smallest, rows.min(axis=0))
        largest = np.maximum(largest, rows.max(axis=0))
    deviations = np.where(smallest == largest, 1.0, np.sqrt(squares / count))
    return tuple((total / count).tolist()), tuple(deviations.tolist())


def _histograms(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count the pixels of each value per channel; shape (channels, 256)."""
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for channel in range(channels):
        pixels = images[..., channel].ravel()
        # np.bincount copies its input to int64: eight bytes for each pixel.
        for start in range(0, len(pixels), _PIXELS_AT_ONCE):
            some = pixels[start : start + _PIXELS_AT_ONCE]
            counts[channel] += np.bincount(some, minlength=256)
    return counts


def normalizer(
    spec: InputSpec, device: torch.device = torch.device("cpu")
) -> Callable[[Tensor], Tensor]:
    """Return the function from stored inputs to inputs of models."""
    return TokenIds(spec) if spec.dtype in TEXTS else Normalizer(spec, device)


def require_tensor(inputs: object, num_dimensions: int | None = None) -> None:
    """Raise a `DataError` if ``inputs`` is not a tensor of stored inputs."""
    kind = type(inputs).__name__
    if isinstance(inputs, Tensor):
        if num_dimensions in (None, inputs.ndim):
            return
        kind = f"tensor of shape {tuple(inputs.shape)}"
    raise DataError(
        f"found a {kind}, expected a tensor of inputs (n, height, width, channels), "
        "rows as (n, 1, 1, features); knnper.Run.inputs makes one of a table or an "
        "array"
    )


class TokenIds:
    """Validates the ids of text and brings their axes to the order of models."""

    def __init__(self, spec: InputSpec) -> None:
        self._largest = spec.largest_whole
        is_tokenised = spec.vocabulary is not None
        self._maker = (
            "the tokenizer" if is_tokenised else "knnper.data.characters.encode"
        )

    def __call__(self, windows: Tensor) -> Tensor:
        """Return int64 of shape (n, T, 1, 1) from stored ids of shape (n, 1, 1, T)."""
        wrong = (windows < 0) | (windows > self._largest)
        if wrong.any():
            raise DataError(
                f"found the id {windows[wrong][0]} in a text, expected ids from 0 to "
                f"{self._largest}, as {self._maker} makes them"
            )
        return windows.to(torch.int64).permute(0, 3, 1, 2)


class Normalizer:
    """Standardises each channel; uint8 images are first scaled to [0, 1]."""

    def __init__(
        self, spec: InputSpec, device: torch.device = torch.device("cpu")
    ) -> None:
        mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        std = torch.tensor(spec.std, dtype=torch.float32, device=device)
        largest = 255.0 if spec.dtype == "uint8" else 1.0
        self._scale = 1.0 / (largest * std)
        self._shift = -mean / std

    def __call__(self, images: Tensor) -> Tensor:
        """Convert stored images to float32 of shape (n, channels, height, width).

        The result keeps the channels innermost in memory (``channels_last``), the
        fastest layout for convolutions, without a copy.
        """
        require_tensor(images, num_dimensions=4)
        scaled = images.to(torch.float32, copy=True).mul_(self._scale)
        return scaled.add_(self._shift).permute(0, 3, 1, 2)
