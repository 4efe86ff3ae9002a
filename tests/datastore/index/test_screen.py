"""A flat index whose vectors are screened finds what it finds without."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore import screen
from knnper.datastore import screen as screening
from knnper.datastore.index import Ids, Vectors
from knnper.datastore.index_kinds import FlatIndex, FlatSettings, build_flat
from knnper.datastore.ranking import Distances, nearest
from knnper.datastore.screen import Screen, Screening, can_leave, can_screen

DIM, NUM_VECTORS, NUM_QUERIES = 32, 200, 6


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Screen few vectors, from the second query on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "FEWEST_NUMBERS", 1)
        patch.setattr(screen, "FEWEST_TOGETHER", 1)
        patch.setattr(screen, "_AT_LEAST", 20)
        patch.setattr(screen, "_FOR_EACH", 2)
        patch.setattr(screen, "_SHARE", 4)
        patch.setattr(screening, "PAYS_AFTER", 0)
        yield


def normal(rng: np.random.Generator, num_vectors: int) -> Vectors:
    """Return numbers around zero."""
    return rng.normal(size=(num_vectors, DIM)).astype(np.float32)


def with_outlier(rng: np.random.Generator, num_vectors: int) -> Vectors:
    """Return vectors of which one is so long that all codes mean little."""
    vectors = normal(rng, num_vectors)
    vectors[0] *= 1e12
    return vectors


def with_twins(rng: np.random.Generator, num_vectors: int) -> Vectors:
    """Return vectors of which most are there several times."""
    return normal(rng, num_vectors // 4 + 1)[
        rng.integers(0, num_vectors // 4, num_vectors)
    ]


KINDS: Mapping[str, Callable[[np.random.Generator, int], Vectors]] = {
    "normal": normal,
    "outlier": with_outlier,
    "twins": with_twins,
    "whole": lambda rng, n: np.rint(2 * normal(rng, n)),
    "equal": lambda _, n: np.full((n, DIM), 0.1, np.float32),
    "zero": lambda _, n: np.zeros((n, DIM), np.float32),
    "beside": lambda rng, n: 1e6 + normal(rng, n),
    "hardly apart": lambda rng, n: 1 + 1e-6 * normal(rng, n),
    "small": lambda rng, n: 1e-9 * normal(rng, n),
    "squares vanish": lambda rng, n: np.float32(1e-25) * normal(rng, n),
    "denormal": lambda rng, n: np.float32(1e-41) * normal(rng, n),
    "beyond half precision": lambda rng, n: 1e6 * normal(rng, n),
    "large": lambda rng, n: np.clip(1e14 * normal(rng, n), -1e15, 1e15),
    "squares overflow": lambda rng, n: np.float32(1e30) * normal(rng, n),
}


def found(index: FlatIndex, queries: Vectors, count: int) -> tuple[Distances, Ids]:
    """Return what a store would find."""
    return nearest(queries, index, FlatSettings(), count, index.vectors)


def expected(
    vectors: Vectors, ids: Ids, queries: Vectors, count: int
) -> tuple[Distances, Ids]:
    """Return the same by brute force, in float64; of equals, the smaller ids."""
    difference = vectors.astype(np.float64) - queries[:, None]
    distances = np.einsum("mnp,mnp->mn", difference, difference)
    order = np.stack([np.lexsort((ids, row))[:count] for row in distances])
    rows = np.arange(len(queries))[:, None]
    return distances[rows, order], ids[order]


def queries_near(rng: np.random.Generator, kind: str, vectors: Vectors) -> Vectors:
    """Return queries: alike, stored, at zero, and far from all."""
    queries = KINDS[kind](rng, NUM_QUERIES).astype(np.float32)
    queries[0] = vectors[3]
    queries[1] = 0
    queries[2] = 1e25
    return queries


@given(
    st.sampled_from(sorted(KINDS)), st.integers(0, 2**32), st.sampled_from([1, 3, 12])
)
@settings(max_examples=60, deadline=None)
def test_the_nearest_are_the_same_in_every_bit(
    kind: str, seed: int, count: int
) -> None:
    """Whatever the numbers: ids, distances and the order of ties."""
    rng = np.random.default_rng(seed)
    vectors = KINDS[kind](rng, NUM_VECTORS).astype(np.float32)
    ids = rng.permutation(NUM_VECTORS).astype(np.int64)
    queries = queries_near(rng, kind, vectors)
    index = build_flat(FlatSettings(), DIM, ids, vectors)
    for rows in (queries, *queries[:, None]):
        distances, nearest_ids = found(index, rows, count)
        true_distances, true_ids = expected(vectors, ids, rows, count)
        assert (nearest_ids == true_ids).all()
        assert np.allclose(distances, true_distances, rtol=1e-12, atol=0)


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_changes_are_followed(seed: int) -> None:
    """What was added is found, what was removed is not."""
    rng = np.random.default_rng(seed)
    vectors = normal(rng, NUM_VECTORS)
    ids = np.arange(NUM_VECTORS)
    index = build_flat(FlatSettings(), DIM, ids[:150], vectors[:150])
    queries = normal(rng, NUM_QUERIES)
    found(index, queries, 3)
    index.add(ids[150:], vectors[150:])
    gone = rng.choice(NUM_VECTORS, 40, replace=False)
    for left in (ids, np.setdiff1d(ids, gone)):
        index.remove(np.setdiff1d(index.ids, left))
        found_ids = found(index, queries, 3)[1]
        assert (found_ids == expected(vectors[left], left, queries, 3)[1]).all()


def test_only_few_vectors_are_compared() -> None:
    """Where codes tell them apart the answer is from the screen."""
    rng = np.random.default_rng(0)
    vectors = normal(rng, NUM_VECTORS)
    answer = Screen(vectors).nearest(vectors[7], 3, vectors)
    assert answer is not None
    squared, slots = answer
    assert slots[0] == 7
    assert squared[0] == 0
    assert (np.diff(squared) >= 0).all()


@pytest.mark.parametrize(("stretch", "fewest"), [(1, 90), (12, 50), (20, 1), (60, 0)])
def test_an_answer_is_right_however_coarse_the_codes(
    stretch: float, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that put vectors in another order leave more of them, and miss none."""
    monkeypatch.setattr(screen, "_AT_LEAST", 150)
    rng = np.random.default_rng(0)
    vectors, ids = normal(rng, NUM_VECTORS), np.arange(NUM_VECTORS)
    vectors[0] *= stretch
    kept, queries = Screen(vectors), normal(rng, 100)
    # As near to what codes stand for as float32 allows.
    step = (vectors.max() - vectors.min()) / 255
    queries[50:] = vectors.min() + step * np.rint((queries[50:] - vectors.min()) / step)
    true_ids = expected(vectors, ids, queries, 3)[1]
    answers = [kept.nearest(query, 3, vectors) for query in queries]
    given_ids = [None if one is None else one[1].tolist() for one in answers]
    pairs = list(zip(given_ids, true_ids.tolist(), strict=True))
    assert all(one in (None, true) for one, true in pairs)
    assert sum(one == true for one, true in pairs) >= fewest


def test_vectors_that_need_not_be_read_are_not() -> None:
    """Those that the codes rule out may hold anything."""
    rng = np.random.default_rng(0)
    vectors = normal(rng, NUM_VECTORS)
    kept = Screen(vectors)
    distances = np.square(vectors - vectors[7]).sum(axis=1)
    spoilt = vectors.copy()
    spoilt[distances.argsort()[100:]] = np.nan
    answer = kept.nearest(vectors[7], 3, spoilt)
    assert answer is not None
    assert not np.isnan(answer[0]).any()


def test_no_answer_where_all_are_alike() -> None:
    """Equal vectors cannot be ruled out; all are compared then."""
    vectors = np.ones((NUM_VECTORS, DIM), np.float32)
    assert Screen(vectors).nearest(vectors[0], 3, vectors) is None


def test_a_screen_that_never_answers_is_given_up() -> None:
    """It would only take time."""
    vectors = np.ones((NUM_VECTORS, DIM), np.float32)
    kept = Screen(vectors)
    for _ in range(32):
        assert kept.is_worthwhile
        kept.nearest(vectors[0], 3, vectors)
    assert not kept.is_worthwhile


def test_codes_do_not_stretch_to_what_is_far_outside() -> None:
    """A vector that would make all errors large is refused, and no other."""
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    kept = Screen(vectors)
    assert kept.extend(vectors[:2])
    assert not kept.extend(1000 * vectors[:2])
    assert kept.num_bytes == (NUM_VECTORS + 2) * DIM


@pytest.mark.parametrize(
    ("shape", "number", "possible"),
    [
        ((9, 32), 1.0, True),
        ((9, 33), 1.0, False),  # FAISS would compare no integers
        ((1, 33040), 1.0, False),  # their squares may need more than 32 bits
        ((9, 32), 1e16, False),
        ((9, 32), -1e16, False),
    ],
)
def test_what_can_be_screened(
    shape: tuple[int, int], number: float, possible: bool
) -> None:
    """Only vectors whose distances neither overflow nor take long."""
    assert can_screen(np.full(shape, number, np.float32)) is possible


def test_queries_together_are_screened_in_large_indexes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor's cache holds a small one from one query to the next."""
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    monkeypatch.setattr(screen, "FEWEST_TOGETHER", vectors.size + 1)
    kept = Screening()
    assert kept.screen(vectors, 2, 3) is None
    assert kept.screen(vectors, 1, 3) is not None
    monkeypatch.setattr(screen, "FEWEST_TOGETHER", vectors.size)
    assert kept.screen(vectors, 2, 3) is not None


def test_many_wanted_of_few_are_not_screened() -> None:
    """Reading them would take as long as reading all."""
    assert can_leave(10, 80)
    assert not can_leave(11, 80)


def test_a_screen_is_made_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some queries; and anew after as many once something was removed."""
    monkeypatch.setattr(screening, "PAYS_AFTER", 10)
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    kept = Screening()
    assert kept.screen(vectors, 10, 3) is None
    assert kept.screen(vectors, 1, 3) is not None
    assert kept.num_bytes == vectors.size
    kept.drop()
    assert kept.num_bytes == 0
    assert kept.screen(vectors, 10, 3) is None


def test_far_vectors_that_are_added_make_a_new_screen_due() -> None:
    """The one from before would rule nothing out."""
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    kept = Screening()
    assert kept.screen(vectors, 1, 3) is not None
    kept.follow(1000 * vectors[:1])
    assert kept.num_bytes == 0


def test_codes_are_in_no_file(tmp_path: Path) -> None:
    """A file has the same bytes with and without; so deletion need not look there."""
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    index = build_flat(FlatSettings(), DIM, np.arange(NUM_VECTORS), vectors)
    index.write(tmp_path / "before")
    num_bytes = index.num_bytes
    found(index, vectors[:1], 3)
    assert index.num_bytes == num_bytes + vectors.size
    index.write(tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def test_threads_may_ask_while_a_screen_is_made() -> None:
    """All of them get the right answer."""
    vectors = normal(np.random.default_rng(0), NUM_VECTORS)
    index = build_flat(FlatSettings(), DIM, np.arange(NUM_VECTORS), vectors)
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(
            lambda row: int(found(index, vectors[row : row + 1], 1)[1][0, 0]),
            range(NUM_VECTORS),
        )
        assert list(answers) == list(range(NUM_VECTORS))
