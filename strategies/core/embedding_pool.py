"""Caches of embeddings: within a personalisation, and over several runs."""

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
    """Cache of embeddings by the content of weights and images, for several runs.

    All runs must agree in architecture, normalisation, precision, batches, threads and
    device. Embeddings that do not fit are computed each time. Nothing is evicted: runs
    ask for all embeddings in turn, so each would be evicted before its next use.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, cached by content; callers must not modify it."""
        if self._last is None or not torch.equal(self._last[0], weights):
            # A copy, since training may continue in the same memory.
            self._last = weights.clone(), _digest(weights)
        key = self._last[1], _digest(images)
        if key not in self._kept:
            embeddings = compute()
            if embeddings.nbytes > self._left:
                return embeddings
            self._left -= embeddings.nbytes
            self._kept[key] = embeddings
        return self._kept[key]


class EmbeddingPool:
    """Cache of embeddings while a group of clients is personalised.

    The same embeddings are needed to predict, to store and to compare with the global
    model. Images are recognised by object identity and models by their memory; a copy
    is embedded again.
    """

    def __init__(self, kept: KeptEmbeddings | None = None) -> None:
        self._kept = kept
        self._models: list[tuple[Tensor, int]] = []
        self._held: dict[int, Tensor] = {}
        self._embedded: dict[tuple[int, int], Tensor] = {}

    @contextlib.contextmanager
    def holding(
        self, models: Sequence[Tensor], images: Iterable[Tensor], *, keep: bool = True
    ) -> Iterator[None]:
        """Cache embeddings by these models and splits of images in a ``with`` block.

        Equal models share their embeddings. ``keep``: whether to keep the embeddings in
        `KeptEmbeddings`, since other runs may need them.
        """
        if self._held:
            raise RuntimeError("the pool already holds images; one group at a time")
        kept = self._kept
        try:
            self._kept = kept if keep else None
            for weights in models:
                equal = (n for held, n in self._models if torch.equal(held, weights))
                self._models.append((weights, next(equal, len(self._models))))
            self._held = {id(split): split for split in images}
            yield
        finally:
            self._models, self._held, self._embedded = [], {}, {}
            self._kept = kept

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, computed once if both are held."""
        place = weights.data_ptr(), weights.shape
        same = (n for held, n in self._models if (held.data_ptr(), held.shape) == place)
        model = next(same, None)
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


def _digest(tensor: Tensor) -> str:
    content = np.ascontiguousarray(tensor.detach().numpy())
    digest = hashlib.sha256(f"{content.dtype} {content.shape}\n".encode())
    digest.update(content.data)
    return digest.hexdigest()
