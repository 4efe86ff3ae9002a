"""Normalisation layers, by the name that settings give them."""

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

Norm = Literal["batch", "group"]

OptionalNorm = Literal["none", "batch", "group"]

NUM_GROUPS = 8


class TolerantBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that takes a batch with a single value per channel.

    One image at 1x1 resolution has no variance, and `torch.nn.BatchNorm2d` refuses to
    train on it. Here such a batch is normalised with the running statistics, which it
    leaves as they are.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return ``input``, shape (n, channels, height, width), normalised."""
        if self.training and input.numel() == input.shape[1]:
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        return super().forward(input)


def group_norm(num_channels: int) -> nn.GroupNorm:
    """Return GroupNorm in `NUM_GROUPS` groups, which must divide ``num_channels``."""
    return nn.GroupNorm(NUM_GROUPS, num_channels)


NORMS: Mapping[Norm, Callable[[int], nn.Module]] = {
    "batch": TolerantBatchNorm2d,
    "group": group_norm,
}


def norm_layers(norm: OptionalNorm, num_channels: int) -> list[nn.Module]:
    """Return what ``norm`` puts behind a convolution: one layer, or none."""
    return [] if norm == "none" else [NORMS[norm](num_channels)]
