"""Embeddings that several who serve a client, or several runs, have in common.

A split of a client is embedded by itself and shared as a whole, since the last bits of
an embedding may depend on its batch (docs/results.md, "The same bits"). So whoever is
given what another computed has every bit that it would have computed.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""


class KeptEmbeddings:
    """What one model object has computed, by the content of weights and images.

    Runs that differ in λ, k, σ or the capacity alone embed the same images with the
    same weights.

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
        self._kept: dict[tuple[str, str], Tensor] = {}
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


class EmbeddingPool:
    """Images that each model embeds once, however many ask.

    Several who serve a client ask for the same embeddings: to predict, to store, to
    compare with the global model.

    Images are recognised as the very objects that are held, models by their memory, so
    a copy is simply computed.

    Parameters
    ----------
    kept
        Where embeddings of what is held stay for other runs of the same model; None
        forgets them with the images.
    """

    def __init__(self, kept: KeptEmbeddings | None = None) -> None:
        self._kept = kept
        self._models: list[tuple[Tensor, int]] = []
        self._held: dict[int, Tensor] = {}
        self._embedded: dict[tuple[int, int], Tensor] = {}

    @contextlib.contextmanager
    def holding(
        self, models: Sequence[Tensor], images: Iterable[Tensor]
    ) -> Iterator[None]:
        """Hold images and models inside a ``with`` block.

        Parameters
        ----------
        models
            Weights, each of shape (num_weights,); equal ones are one model.
        images
            Those of one split of one client each, uint8 of shape (n, height, width,
            channels).

        Raises
        ------
        RuntimeError
            If something is held already.
        """
        if self._held:
            raise RuntimeError("the pool already holds images; one group at a time")
        try:
            for weights in models:
                self._models.append((weights, self._number_of_equal(weights)))
            self._held = {id(split): split for split in images}
            yield
        finally:
            self._models, self._held, self._embedded = [], {}, {}

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, computed once where both are held."""
        model = self._model(weights)
        if model is None or id(images) not in self._held:
            return embed(weights, images)
        key = model, id(images)
        if key not in self._embedded:
            self._embedded[key] = (
                embed(weights, images)
                if self._kept is None
                else self._kept.embed(weights, images, lambda: embed(weights, images))
            )
        return self._embedded[key]

    def _number_of_equal(self, weights: Tensor) -> int:
        for earlier, number in self._models:
            if torch.equal(earlier, weights):
                return number
        return len(self._models)

    def _model(self, weights: Tensor) -> int | None:
        for held, number in self._models:
            if held.data_ptr() == weights.data_ptr() and held.shape == weights.shape:
                return number
        return None


def _digest(tensor: Tensor) -> str:
    content = np.ascontiguousarray(tensor.detach().numpy())
    digest = hashlib.sha256(f"{content.dtype} {content.shape}\n".encode())
    digest.update(content.data)
    return digest.hexdigest()
