"""The covariance functions between representations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

KernelName: TypeAlias = Literal["rbf", "linear"]


def _rbf(first: Tensor, second: Tensor) -> Tensor:
    """Return exp(-|z - z'|² / 2), shape (n, m)."""
    squares = first.square().sum(dim=1)[:, None] + second.square().sum(dim=1)
    # Written out: the gradient of a distance is not defined where it is zero.
    distances = (squares - 2 * first @ second.T).clamp_min(0)
    return torch.exp(-distances / 2)


def _linear(first: Tensor, second: Tensor) -> Tensor:
    """Return zᵀ z', shape (n, m)."""
    return first @ second.T


def _rbf_diagonal(points: Tensor) -> Tensor:
    return points.new_ones(len(points))


def _linear_diagonal(points: Tensor) -> Tensor:
    return points.square().sum(dim=1)


@dataclass(frozen=True)
class _Shape:
    between: Callable[[Tensor, Tensor], Tensor]
    diagonal: Callable[[Tensor], Tensor]


_SHAPES: Mapping[KernelName, _Shape] = MappingProxyType(
    {
        "rbf": _Shape(_rbf, _rbf_diagonal),
        "linear": _Shape(_linear, _linear_diagonal),
    }
)


@dataclass(frozen=True)
class Kernel:
    """s κ(z / l, z' / l), with κ(z, z') = exp(-|z - z'|² / 2) or zᵀ z'.

    Attributes
    ----------
    name
        ``rbf`` or ``linear``.
    output_scale
        s, the prior variance of the latent function (of z with |z| = l if linear).
    length_scale
        l.
    """

    name: KernelName
    output_scale: float
    length_scale: float

    def matrix(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the covariances, float64 of shape (n, m), of (n, p) and (m, p)."""
        between = _SHAPES[self.name].between
        return self.output_scale * between(self._scaled(first), self._scaled(second))

    def diagonal(self, points: Tensor) -> Tensor:
        """Return the variances, float64 of shape (n,), of points (n, p)."""
        return self.output_scale * _SHAPES[self.name].diagonal(self._scaled(points))

    def _scaled(self, points: Tensor) -> Tensor:
        return points.double() / self.length_scale
