"""From stored images, features or text to what a model takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from knnper.config.errors import DataError
from knnper.data.examples import InputSpec


def normalizer(
    spec: InputSpec, device: torch.device = torch.device("cpu")
) -> Callable[[Tensor], Tensor]:
    """Return what brings stored inputs to the form that models take.

    Parameters
    ----------
    spec
        Says what the inputs are: text is passed on by `TokenIds`, all else is
        standardised by a `Normalizer`.
    device
        Where the inputs are when they are normalised.
    """
    return TokenIds(spec) if spec.dtype == "token" else Normalizer(spec, device)


class TokenIds:
    """Passes the ids of text on as they are, in the order of axes that models take.

    Parameters
    ----------
    spec
        Gives the number of ids that there are.
    """

    def __init__(self, spec: InputSpec) -> None:
        self._num_ids = spec.num_classes

    def __call__(self, windows: Tensor) -> Tensor:
        """Return int64 of shape (n, T, 1, 1) from ids, uint8 of shape (n, 1, 1, T).

        Raises
        ------
        DataError
            If there is an id of no character.
        """
        largest = int(windows.max()) if windows.numel() else 0
        if largest >= self._num_ids:
            raise DataError(
                f"found the id {largest} in a text, expected ids from 0 to "
                f"{self._num_ids - 1}, as knnper.data.text.alphabet.encode makes them"
            )
        return windows.to(torch.int64).permute(0, 3, 1, 2)


class Normalizer:
    """Standardises each channel; uint8 images are scaled to [0, 1] before.

    Parameters
    ----------
    spec
        Gives mean and standard deviation per channel, and the type of the inputs.
    device
        Where the images are when they are normalised.
    """

    def __init__(
        self, spec: InputSpec, device: torch.device = torch.device("cpu")
    ) -> None:
        mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        std = torch.tensor(spec.std, dtype=torch.float32, device=device)
        largest = 255.0 if spec.dtype == "uint8" else 1.0
        self._scale = 1.0 / (largest * std)
        self._shift = -mean / std

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 of shape (n, channels, height, width).

        Parameters
        ----------
        images
            Shape (n, height, width, channels), of the type that the spec says.

        Notes
        -----
        The result keeps the channels innermost in memory (``channels_last``), which
        is how convolutions are fastest, at no cost of a copy.
        """
        scaled = images.to(torch.float32, copy=True).mul_(self._scale)
        return scaled.add_(self._shift).permute(0, 3, 1, 2)
