"""What is served without the validation split must not have been trained on it.

A memory on top chooses λ with it on that split. Choices alone may depend on the split,
and then what is served follows from them and the training split.
"""

import itertools

import pytest
import torch

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import NEWCOMER
from knnper.strategies.core.predictors import EmbeddingPredictor
from tests.strategies.trained_methods import MakeClient, Train

WITH_MEMORY = ("knn_per", "knn_per_protonn")
"""Nothing is put on top of these, so that they are never asked."""

ON_TOP = ("fine_tuning", "linear_probe", "dapper", "mapper_two_stage")

CHOOSING = (
    "clustered_fl",
    "dapper",
    "ditto",
    "hypcluster",
    "mapper",
    "mapper_two_stage",
)
"""What choose a cluster, a weight or a model on the validation split."""

BARE = [(name, None) for name in METHODS if name not in WITH_MEMORY]


def validation_splits(noisy: MakeClient) -> list[Examples]:
    """Return one, another of another length, that in another order, and none.

    On the same examples in another order the choice is the same, but training is not.
    """
    other = noisy(0, 7, seed=99).validation
    turned = other.take(torch.arange(7).roll(1))
    return [noisy(0, 4, 0).validation, other, turned, noisy(0, 0, 1).validation]


@pytest.mark.parametrize("known_as", ["a", NEWCOMER])
@pytest.mark.parametrize(
    ("name", "on_top"), BARE + [("fedavg", on_top) for on_top in ON_TOP]
)
def test_what_is_served_without_validation_has_not_seen_it(
    name: str, on_top: str | None, known_as: str, train: Train, noisy: MakeClient
) -> None:
    run, queries = train(name, on_top), noisy(5, 0, seed=10).train.images
    payload = run.method.broadcast(run.state, known_as, RandomKey(2))
    memory, own = run.memory.get(known_as), run.data["a"].train
    chosen, alone = [], []
    for validation in validation_splits(noisy):
        data = ClientData(own, validation)
        served = run.method.personalize(payload, memory, data, RandomKey(3))
        assert isinstance(served, EmbeddingPredictor)
        chosen.append(served.describe())
        alone.append(served.without_validation())
    chooses = (on_top or name) in CHOOSING
    assert not chooses or chosen[1] == chosen[2]
    for one, other in itertools.combinations(range(len(alone)), 2):
        if chooses and chosen[one] != chosen[other]:
            continue
        assert alone[one].describe() == alone[other].describe()
        assert torch.equal(alone[one](queries), alone[other](queries))


ALWAYS_TRAIN = (
    "fedavg_plus",
    "fedbasis",
    "fedem",
    "fedrep",
    "local",
    "per_fedavg",
    "pfedgp",
    "pfedme",
)
"""What train for everyone in the end; these do for newcomers."""

TRAIN_NEWCOMERS = ("apfl", "ditto", "fed_mtl", "fedbn", "fedper", "l2gd", "lg_fedavg")


@pytest.mark.parametrize(
    ("name", "known_as"),
    [(name, "a") for name in ALWAYS_TRAIN]
    + [(name, NEWCOMER) for name in ALWAYS_TRAIN + TRAIN_NEWCOMERS],
)
def test_what_is_served_has_learnt_from_validation(
    name: str, known_as: str, train: Train, noisy: MakeClient
) -> None:
    run, queries = train(name), noisy(5, 0, seed=10).train.images
    payload = run.method.broadcast(run.state, known_as, RandomKey(2))
    memory, data = run.memory.get(known_as), noisy(9, 5, seed=4)
    served = run.method.personalize(payload, memory, data, RandomKey(3))
    assert isinstance(served, EmbeddingPredictor)
    assert not torch.equal(served(queries), served.without_validation()(queries))
