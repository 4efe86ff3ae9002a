"""New clients, dealt from those of a run that took no part in training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.trained_model import TrainedModel, trained_model
from papers.memory import UnseenImages
from tests.simulation.finished_run import finished_run

KEY = RandomKey(5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    run = finished_run(tmp_path_factory.mktemp("runs"), unseen_fraction=0.34)
    return trained_model(run)


@pytest.fixture(scope="module")
def pool(model: TrainedModel) -> UnseenImages:
    return UnseenImages(model)


def test_the_pool_is_what_unseen_clients_have(
    model: TrainedModel, pool: UnseenImages
) -> None:
    unseen = [part for part in model.partition.clients if not part.seen]
    assert pool.num_clients == len(unseen) == 2
    assert len(pool.known) == pool.num_known
    assert pool.num_known == sum(len(p.train) + len(p.validation) for p in unseen)
    assert len(pool.test) == sum(len(part.test) for part in unseen)
    image = model.dataset.train.examples_at(unseen[0].train).images
    found = (pool.known.embeddings[:, None] - model.embed(image)[None]).abs().sum(dim=2)
    assert bool((found.min(dim=0).values < 1e-4).all())


def test_all_images_are_dealt_once(pool: UnseenImages) -> None:
    clients = pool.partition(4, 0.3, KEY)
    assert len(clients) == 4
    for name in ("known", "test"):
        dealt = torch.cat([getattr(client, name).embeddings for client in clients])
        whole = getattr(pool, name).embeddings
        assert sorted(dealt.tolist()) == sorted(whole.tolist())


def test_small_alphas_make_clients_uneven(pool: UnseenImages) -> None:
    def classes_each(alpha: float) -> float:
        clients = pool.partition(4, alpha, KEY)
        return sum(len(set(one.known.labels.tolist())) for one in clients) / 4

    assert classes_each(0.05) + 2 < classes_each(100.0)


def test_the_same_key_deals_the_same(pool: UnseenImages) -> None:
    first, again = pool.partition(3, 0.3, KEY)[1], pool.partition(3, 0.3, KEY)[1]
    assert torch.equal(first.known.embeddings, again.known.embeddings)
    other = pool.partition(3, 0.3, RandomKey(6))[1]
    assert first.known.labels.tolist() != other.known.labels.tolist()


def test_not_more_clients_than_images(pool: UnseenImages) -> None:
    pool.require_clients(pool.num_known)
    with pytest.raises(RunError, match=rf"found 9999 .* at most {pool.num_known}, the"):
        pool.require_clients(9999)


def test_something_is_there_to_be_tested_on(model: TrainedModel) -> None:
    clients = tuple(
        replace(one, test=one.test if one.seen else one.test[:0])
        for one in model.partition.clients
    )
    bench = replace(model.bench, partition=replace(model.partition, clients=clients))
    pool = UnseenImages(replace(model, bench=bench))
    with pytest.raises(RunError, match="found no test images at the 2 unseen clients"):
        pool.require_clients(1)


def test_somebody_took_no_part_in_training(tmp_path: Path) -> None:
    pool = UnseenImages(trained_model(finished_run(tmp_path)))
    with pytest.raises(RunError, match=r"set partition.unseen_fraction=0.2"):
        pool.require_clients(1)
