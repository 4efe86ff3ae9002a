"""The bare training loop; needs only torch, so that any environment can run it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD


@dataclass(frozen=True)
class BareImages:
    """Images in one tensor."""

    pixels: Tensor  # uint8, shape (n, height, width, channels)
    labels: Tensor  # int64, shape (n,)
    scale: Tensor  # with the shift, normalises a float32 batch; shape (channels,)
    shift: Tensor

    def to(self, device: torch.device) -> "BareImages":
        """Move the images to a device."""
        whole = (self.pixels, self.labels, self.scale, self.shift)
        pixels, labels, scale, shift = (tensor.to(device) for tensor in whole)
        return BareImages(pixels, labels, scale, shift)

    def batch(self, positions: Tensor) -> Tensor:
        """Return normalised images, float32 of shape (n, channels, height, width)."""
        return self.normalized(self.pixels[positions])

    def normalized(self, pixels: Tensor) -> Tensor:
        """Normalise selected pixels; see `batch`."""
        images = pixels.to(torch.float32)
        return images.mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)


def train(
    model: nn.Module, optimizer: SGD, images: BareImages, batches: Sequence[Tensor]
) -> float:
    """Make a step on each batch; return the last loss."""
    model.train()
    loss = torch.zeros(())
    for positions in batches:
        logits = model(images.batch(positions))
        loss = functional.cross_entropy(logits, images.labels[positions])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()
