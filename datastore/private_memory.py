"""Private answers from a store: charges are on disk before an answer leaves."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore.examples import Contents, Ids, require_embeddings
from knnper.datastore.private_answers import (
    PrivateAnswerSettings,
    mixed_probabilities,
    noisy_votes,
    normalised,
)
from knnper.datastore.store import Store
from knnper.privacy import system_noise


@dataclass(frozen=True, eq=False)
class PrivatePrediction:
    """Private predictions for n inputs."""

    probabilities: Tensor  # λ p_vote + (1 - λ) p_global, float32 of shape (n, c)
    fingerprint: str  # of the model that was used

    @property
    def labels(self) -> Tensor:
        """The most probable class, int64 of shape (n,)."""
        return self.probabilities.argmax(dim=1)


class PrivateMemory:
    """The private vote of a store's examples, mixed with the global model.

    Any number of threads may use it; one answers at a time, so that each budget is
    spent once.

    Parameters
    ----------
    fingerprint
        Of the model that embeds the queries.
    make_rng
        Makes the source of the noise of one request; by default from the operating
        system. Only tests pass another.
    """

    def __init__(
        self,
        store: Store,
        settings: PrivateAnswerSettings,
        fingerprint: str,
        make_rng: Callable[[], np.random.Generator] = system_noise,
    ) -> None:
        self.settings = settings
        self._store = store
        self._fingerprint = fingerprint
        self._make_rng = make_rng
        # The ids and normalised embeddings that were read last.
        self._ids: Ids = np.empty(0, np.int64)
        self._unit: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def predict(
        self, embeddings: Tensor, global_probabilities: Tensor
    ) -> PrivatePrediction:
        """Answer n queries, in order; their charges are on disk when this returns.

        Parameters
        ----------
        embeddings, global_probabilities
            float32 of shape (n, p), and p_global, float32 of shape (n, c).

        Raises
        ------
        DataError
            If an embedding is not finite.
        StoreMismatchError
            If the store was embedded by another model.
        """
        with self._store.unchanged(self._fingerprint) as contents:
            require_embeddings("queries", embeddings, self._store.embedding_dim)
            unit_queries = normalised(embeddings.detach().numpy())
            cosines = unit_queries @ self._unit_vectors(contents).T
            # Only these can vote on any of the queries: the others are not charged.
            near = (cosines >= self.settings.threshold).any(axis=0)
            ids = contents.ids[near]
            spent = self._store.charges(ids)
            votes = noisy_votes(
                cosines[:, near],
                contents.labels[near],
                spent,
                self._store.num_classes,
                self.settings,
                self._make_rng(),
            )
            is_charged = votes.spent > spent
            self._store.charge(ids[is_charged], votes.spent[is_charged])
        p_global = global_probabilities.detach().numpy()
        knn_weight = self.settings.knn_weight
        probabilities = mixed_probabilities(votes, p_global, knn_weight)
        return PrivatePrediction(torch.from_numpy(probabilities), self._fingerprint)

    def share_voting(self) -> float:
        """Return the fraction of the stored examples that can still vote.

        It depends on the examples without noise, so only their owner may see it.
        """
        with self._store.unchanged() as contents:
            spent = self._store.charges(contents.ids)
        return float(self.settings.can_vote(spent).mean()) if len(spent) else 0.0

    def _unit_vectors(self, contents: Contents) -> NDArray[np.float32]:
        """Return the normalised embeddings (N, p)."""
        if self._ids is not contents.ids:
            self._unit = normalised(self._store.vectors(contents.ids).numpy())
            self._ids = contents.ids
        return self._unit
