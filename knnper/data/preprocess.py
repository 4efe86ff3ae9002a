"""From stored images or features to what a model takes."""

import torch
from torch import Tensor

from knnper.data.examples import InputSpec


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
