"""A prediction with all that explains it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client.residence.names import Names
from client.residence.serving import Serving
from datastore.contents import Contents
from datastore.errors import StoreBusyError
from datastore.examples import Selection
from datastore.neighbors import Neighbors
from datastore.prediction.class_prior import ClassPrior, adapted, count_labels
from datastore.prediction.interpolation import mixed
from datastore.prediction.kernel import KERNELS
from datastore.prediction.vote import neighbor_vote
from datastore.store_reader import StoreReader
from knnper.transport.model_folder.global_model import GlobalModel

ATTEMPTS, PAUSE_S = 200, 0.005
"""To search a store that others change: a search takes about as long as a change."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for n inputs, all from one state of model and store.

    c is the number of classes, k' the number of neighbours that were found.

    Attributes
    ----------
    labels
        The most probable class, int64 of shape (n,).
    probabilities
        λ p_kNN + (1 - λ) p_global, float32 of shape (n, c).
    knn_probabilities
        p_kNN, float32 of shape (n, c); None where the store is empty.
    global_probabilities
        p_global, float32 of shape (n, c).
    adapted_probabilities
        p_global with the class prior of what is stored, which is mixed in its place;
        None where there is no class prior.
    knn_weight
        λ as it was used: 0 where the store is empty.
    neighbors
        Shape (n, k').
    neighbor_weights
        Each neighbour's share of the vote, float64 of shape (n, k').
    neighbor_names
        The owner's names of the neighbours, n rows of k'; None for one without.
    fingerprint
        Of the model.
    num_stored
        Examples in the store.
    """

    labels: Tensor
    probabilities: Tensor
    knn_probabilities: Tensor | None
    global_probabilities: Tensor
    adapted_probabilities: Tensor | None
    knn_weight: float
    neighbors: Neighbors
    neighbor_weights: Tensor
    neighbor_names: Sequence[Sequence[str | None]]
    fingerprint: str
    num_stored: int


def predict(
    model: GlobalModel,
    store: StoreReader,
    serving: Serving,
    names: Names,
    images: Tensor,
) -> Prediction:
    """Return what a client predicts; knn-per.txt, Eq. 6-7.

    The probabilities are those of `datastore.prediction.predictor.KnnPredictor`.

    Parameters
    ----------
    model, store, serving
        The parts of what is served.
    names
        Of the store's examples.
    images
        n inputs, shape (n, height, width, channels).

    Raises
    ------
    StoreMismatchError
        If another model has embedded the store by now.
    StoreBusyError
        If the store changes all the time.
    DataError
        If an embedding is not finite.
    """
    embeddings = model.embed(images)
    alone = model.head(embeddings)
    contents, found, named = _looked_up(
        store, names, embeddings, serving.num_neighbors, model.fingerprint
    )
    log_weights = KERNELS[serving.kernel](
        found.squared_distances, serving.kernel_scale, model.embedding_dim
    )
    votes = None
    if found.ids.shape[1] > 0:
        votes = neighbor_vote(log_weights, found.labels, alone.shape[1])
    weight = 0.0 if votes is None else serving.knn_weight
    own = _adapted(alone, contents, serving.class_prior)
    base = alone if own is None else own
    probabilities = base if votes is None else mixed(votes, base, weight)
    return Prediction(
        labels=probabilities.argmax(dim=1),
        probabilities=probabilities,
        knn_probabilities=votes,
        global_probabilities=alone,
        adapted_probabilities=own,
        knn_weight=weight,
        neighbors=found,
        neighbor_weights=torch.softmax(log_weights, dim=1),
        neighbor_names=named,
        fingerprint=model.fingerprint,
        num_stored=len(contents),
    )


def _adapted(
    alone: Tensor, contents: Contents, prior: ClassPrior | None
) -> Tensor | None:
    if prior is None:
        return None
    return adapted(alone, count_labels(contents, alone.shape[1]), prior)


def _looked_up(
    store: StoreReader,
    names: Names,
    embeddings: Tensor,
    num_neighbors: int,
    fingerprint: str,
) -> tuple[Contents, Neighbors, list[list[str | None]]]:
    """Return contents, neighbours and their names, all of one state of the store."""
    for _ in range(ATTEMPTS):
        # A store whose contents change gets new ones, never changes those it had.
        contents = store.contents()
        found = store.search(embeddings, num_neighbors, fingerprint)
        named = names.of(found.ids.numpy())
        if _all_there(store, found, named) and store.contents() is contents:
            return contents, found, named
        # What leaves the database has a moment to leave the index, too.
        time.sleep(PAUSE_S)
    raise StoreBusyError(
        f"the store changed during each of {ATTEMPTS} searches; ask again in a moment"
    )


def _all_there(
    store: StoreReader, found: Neighbors, names: list[list[str | None]]
) -> bool:
    """Whether no neighbour left the database while the index still had it."""
    if not any(None in row for row in names):
        return True
    ids = set(found.ids.flatten().tolist())
    return len(store.select(Selection(ids=tuple(ids)))) == len(ids)
