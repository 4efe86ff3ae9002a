"""The network; the YAML file beside this one names it as ``model:Net``."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions and a linear layer.

    What goes into the last linear layer is the representation that memories compare.
    ``num_classes`` and ``input_shape``, (channels, height, width), are those of the
    data; every other parameter is a setting of the section ``model``.
    """

    def __init__(
        self, num_classes: int, input_shape: tuple[int, int, int], width: int = 32
    ) -> None:
        super().__init__()
        channels = input_shape[0]
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, num_classes) of images (n, channels, height, width)."""
        logits: Tensor = self.classifier(torch.flatten(self.features(x), start_dim=1))
        return logits
