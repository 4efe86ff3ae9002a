"""Embedding the images of several clients together, where they share a model."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from strategies.core.kept_embeddings import KeptEmbeddings

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""


class EmbeddingPool:
    """Images that are embedded at once when the first of them is asked for.

    A client's few images make small batches, and several who serve it ask for the same
    embeddings: to predict, to store, to compare with the global model. While images are
    held here, each is embedded once by each model, in batches as large as any.

    Images are recognised as the very objects that are held, models by their memory, so
    a copy is simply computed. The results differ from separate ones in their last bits
    at most.

    Parameters
    ----------
    kept
        Where what is embedded together stays for other runs of the same model; None
        forgets it with the images.
    """

    def __init__(self, kept: KeptEmbeddings | None = None) -> None:
        self._kept = kept
        self._models: list[tuple[Tensor, int]] = []
        self._parts: list[list[Tensor]] = []
        self._embedded: dict[tuple[int, int], dict[int, Tensor]] = {}

    @contextlib.contextmanager
    def holding(
        self, models: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]
    ) -> Iterator[None]:
        """Hold images and models inside a ``with`` block.

        Parameters
        ----------
        models
            Weights, each of shape (num_weights,); equal ones are one model.
        parts
            Images, uint8 of shape (n, height, width, channels) each. Whoever asks for
            one of a part is likely to ask for all of it: a part is embedded together.

        Raises
        ------
        RuntimeError
            If something is held already.
        """
        if self._parts:
            raise RuntimeError("the pool already holds images; one group at a time")
        try:
            for weights in models:
                self._models.append((weights, self._number_of_equal(weights)))
            self._parts = [list(part) for part in parts]
            yield
        finally:
            self._models, self._parts, self._embedded = [], [], {}

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, as computed with others where possible."""
        model = self._model(weights)
        part = self._part(images)
        if model is None or part is None:
            return embed(weights, images)
        if (model, part) not in self._embedded:
            held = self._parts[part]
            together = self._together(weights, torch.cat(held), embed)
            rows = torch.split(together, [len(one) for one in held])
            self._embedded[model, part] = {
                id(one): its_rows for one, its_rows in zip(held, rows, strict=True)
            }
        return self._embedded[model, part][id(images)]

    def _together(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        if self._kept is None:
            return embed(weights, images)
        return self._kept.embed(weights, images, lambda: embed(weights, images))

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

    def _part(self, images: Tensor) -> int | None:
        for number, part in enumerate(self._parts):
            if any(held is images for held in part):
                return number
        return None
