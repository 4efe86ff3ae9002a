"""The benchmarked clients: as many as asked for, each of the size that is asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workload import NUM_CLASSES, NUM_IMAGES, Workload
from knnper.data.examples import Dataset
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.strategies.core.records import ModelPayload

TINY = Workload(3, 4, 2, 5, model="tiny_cnn", embedding_dim=1)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return TINY.dataset()


@settings(max_examples=30, deadline=None)
@given(
    num_clients=st.integers(1, 40),
    sizes=st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(0, 900)),
)
def test_clients_have_their_sizes_and_no_image_twice(
    data: Dataset, num_clients: int, sizes: tuple[int, int, int]
) -> None:
    clients = Workload(num_clients, *sizes).partition(data).clients
    assert len(clients) == num_clients
    for client in clients:
        found = len(client.train), len(client.validation), len(client.test)
        assert found == sizes
        own = np.concatenate([client.train, client.validation])
        assert len(np.unique(own)) == len(own)
        assert len(np.unique(client.test)) == len(client.test)
        assert all(0 <= index < NUM_IMAGES for index in [*own, *client.test])


def test_clients_share_no_images_while_there_are_enough(data: Dataset) -> None:
    clients = Workload(50, 80, 20, 20).partition(data).clients
    own = [part for one in clients for part in (one.train, one.validation)]
    assert sorted(np.concatenate(own)) == list(range(5000))
    tested = np.concatenate([client.test for client in clients])
    assert sorted(tested) == list(range(1000))
    *_, last = Workload(3, num_train=4000).partition(data).clients
    assert last.train.tolist() == [*range(2000), *range(8000, 10_000)]


def test_more_images_than_there_are_is_an_error(data: Dataset) -> None:
    with pytest.raises(DataError, match="at least 10001 images a split, found 10000"):
        Workload(1, num_train=10_001).partition(data)


def test_names_sort_like_numbers_and_are_all_seen(data: Dataset) -> None:
    clients = Workload(10_001, num_train=1).partition(data).clients
    names = [client.name for client in clients]
    assert names == sorted(set(names))
    assert (names[0], names[-1]) == ("00000", "10000")
    assert all(client.seen for client in clients)


def test_images_are_coloured_and_the_same_in_every_process(data: Dataset) -> None:
    again = TINY.dataset()
    for split, twin in ((data.train, again.train), (data.test, again.test)):
        assert split.images.shape == (NUM_IMAGES, 32, 32, 3)
        assert set(split.labels.tolist()) == set(range(NUM_CLASSES))
        assert np.array_equal(split.images, twin.images)
        assert np.array_equal(split.labels, twin.labels)
    assert not np.array_equal(data.train.images, data.test.images)


@pytest.mark.parametrize("echoes", [True, False])
def test_clients_echo_or_train(echoes: bool) -> None:
    bench = replace(TINY, echoes=echoes).workbench()
    sent = ModelPayload(bench.task.initial_weights)
    data = bench.clients.data("0001")
    _, update = bench.method.client_update(sent, None, data, 1, RandomKey(0))
    assert (update.weights is sent.weights) == echoes
    assert torch.equal(update.weights, sent.weights) == echoes
    assert update.num_examples == 4


def test_workers_have_one_thread_each() -> None:
    run = replace(TINY, num_workers=3).experiment().run
    assert (run.num_workers, run.threads_per_worker) == (3, 1)
