"""Embeddings that several runs of one trained model have in common."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""

Key = tuple[str, str]


class KeptEmbeddings:
    """What one model object has computed, by the content of weights and images.

    Runs that differ in λ, k, σ or the capacity alone embed the same images with the
    same weights. They ask in the same batches, and a batch is kept as a whole, so that
    every bit is what it would be without.

    Whoever asks must agree in all else: architecture, normalisation, precision,
    batches, threads and device.

    Parameters
    ----------
    most_bytes
        Room. What no longer fits is computed each time: runs ask for everything in
        turn, so that whatever made room would be gone before it is asked for.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[Key, Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, or what it returned for equal weights and images.

        Parameters
        ----------
        weights
            Shape (num_weights,), on the CPU.
        images
            Shape (n, height, width, channels), on the CPU.
        compute
            Returns their embeddings (n, p), which nobody changes afterwards.
        """
        key = self._model(weights), _digest(images)
        if key not in self._kept:
            embeddings = compute()
            if embeddings.nbytes > self._left:
                return embeddings
            self._left -= embeddings.nbytes
            self._kept[key] = embeddings
        return self._kept[key]

    def _model(self, weights: Tensor) -> str:
        """Return the digest of weights, which are mostly those of the last call."""
        if self._last is None or not torch.equal(self._last[0], weights):
            # A copy: training may go on in the same memory.
            self._last = weights.clone(), _digest(weights)
        return self._last[1]


def _digest(tensor: Tensor) -> str:
    content = np.ascontiguousarray(tensor.detach().numpy())
    digest = hashlib.sha256(f"{content.dtype} {content.shape}\n".encode())
    digest.update(content.data)
    return digest.hexdigest()
