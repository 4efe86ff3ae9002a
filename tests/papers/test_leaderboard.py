"""PFLlib's split by hand-made labels, its pool, its network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from knnper.data.normalization import Normalizer
from knnper.errors import DataError
from papers.leaderboard import PooledCifar100Sheets, four_layer_cnn, pooled_dirichlet

pytestmark = pytest.mark.integration

RNG = np.random.default_rng(0)


@pytest.fixture
def sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two classes, black and white, of two images to train and one to test."""
    monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "cache"))
    rows = "fine_id,fine,coarse_id,coarse\n0,apple,7,fruit\n1,bee,4,insects\n"
    for split, width in (("train", 64), ("test", 32)):
        place = tmp_path / "files" / split
        place.mkdir(parents=True)
        for name, value in (("apple", 0), ("bee", 255)):
            image = Image.fromarray(np.full((32, width, 3), value, np.uint8))
            image.save(place / f"{name}.webp", lossless=True)
    (tmp_path / "files/classes.csv").write_text(rows)
    return tmp_path / "files"


def test_a_pool_has_both_splits_scaled_to_one(sheets: Path) -> None:
    found = PooledCifar100Sheets(path=str(sheets)).load()
    assert found.test is found.train
    assert found.train.labels.tolist() == [0, 0, 1, 1, 0, 1]
    images = torch.from_numpy(np.array(found.train.images))
    scaled = Normalizer(found.spec)(images)
    expected = torch.tensor([-1.0, -1, 1, 1, -1, 1]).expand(32, 32, 3, 6)
    torch.testing.assert_close(scaled.permute(2, 3, 1, 0), expected)


def test_even_weights_split_evenly_and_three_quarters_are_learnt_from() -> None:
    # Of nine examples of a label the first client has 4.5, rounded down.
    labels = np.arange(18) % 2
    train, test = pooled_dirichlet(labels, labels, RNG, num_clients=2, alpha=1e12)
    held = [np.concatenate(own) for own in zip(train, test, strict=True)]
    assert [np.bincount(labels[own]).tolist() for own in held] == [[4, 4], [5, 5]]
    assert [len(one) for one in train] == [6, 7]
    assert [len(one) for one in test] == [2, 3]
    assert sorted(np.concatenate(held)) == list(range(18))


def test_who_has_its_share_gets_no_more() -> None:
    # Each label goes to one client as a whole; who has the first has 5 of 5.
    labels = np.repeat([0, 1], 5)
    for _ in range(20):
        train, test = pooled_dirichlet(labels, labels, RNG, num_clients=2, alpha=1e-6)
        held = [labels[np.concatenate(one)] for one in zip(train, test, strict=True)]
        assert sorted(one.tolist() for one in held) == [[0] * 5, [1] * 5]
        assert [len(one) for one in test] == [2, 2]


def test_it_is_drawn_anew_until_everyone_has_enough() -> None:
    labels = np.repeat([0, 1, 2], 40)
    # One label each, or the third one has none.
    train, test = pooled_dirichlet(labels, labels, RNG, num_clients=3, alpha=1e-6)
    assert [len(one) for one in train] == [30] * 3
    assert [len(one) for one in test] == [10] * 3


def test_a_split_that_is_no_pool_is_refused() -> None:
    with pytest.raises(DataError, match="expected all data of one pool"):
        pooled_dirichlet(np.zeros(9, int), np.zeros(8, int), RNG)


def test_the_network_has_as_many_weights_as_pfllibs() -> None:
    network = four_layer_cnn(100, (3, 32, 32))
    # 5x5 kernels: 3 to 32, 32 to 64; 64 maps of 5x5 to 512; the head. And biases.
    expected = 75 * 32 + 32, 800 * 64 + 64, 1600 * 512 + 512, 512 * 100 + 100
    assert sum(one.numel() for one in network.parameters()) == sum(expected)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
