"""Asking for huge pages changes nothing but speed."""

import ctypes
import sys

import numpy as np
import pytest

from knnper.datastore.codes import FEWEST_BYTES, use_huge_pages
from knnper.datastore.index_catalogue import build_index
from knnper.datastore.index_kinds import FlatSettings


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has it")
def test_content_stays_as_it_is() -> None:
    numbers = np.arange(2 * FEWEST_BYTES // 4, dtype=np.int32)
    use_huge_pages(numbers.ctypes.data, numbers.nbytes)
    assert np.array_equal(numbers, np.arange(len(numbers)))


def test_little_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_to_be_called(name: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ctypes, "CDLL", not_to_be_called)
    assert not use_huge_pages(4096, FEWEST_BYTES - 1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not use_huge_pages(4096, FEWEST_BYTES)


def test_a_large_index_asks_each_time_it_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def note(address: int, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return use_huge_pages(address, num_bytes)

    monkeypatch.setattr("knnper.datastore.codes.use_huge_pages", note)
    dim, count = 1024, 1200
    vectors = np.random.default_rng(0).normal(size=(count, dim)).astype("float32")
    index = build_index(FlatSettings(), dim, np.arange(count), vectors)
    assert asked[-1] == count * dim * 4 > FEWEST_BYTES
    index.add(np.arange(count, 3 * count), np.concatenate([vectors, vectors]))
    assert asked[-1] == 3 * count * dim * 4
    assert np.array_equal(index.vectors(np.arange(count)), vectors)
