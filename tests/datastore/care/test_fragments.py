"""Pieces of secrets, and where they are found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.erasure import Fragments, distinctive


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def found(fragments: Fragments, content: bytes) -> list[tuple[int, bytes]]:
    return list(fragments.find(np.frombuffer(content, np.uint8)))


def test_fragments_are_taken_where_something_is() -> None:
    secret = bytes(256 + 100) + noise(156) + bytes(512)
    fragment, *others = distinctive(secret)
    assert others == []
    # Windows begin at multiples of 16: this one holds four zeros, then noise.
    assert fragment == secret[352:368]


@pytest.mark.parametrize("secret", [b"", bytes(3072), bytes([7, 9]) * 600, b"\1\2\3\4"])
def test_what_is_plain_or_short_cannot_be_proven(secret: bytes) -> None:
    fragments = Fragments([secret, noise(64)])
    assert fragments.unprovable == [0]
    assert fragments.num_secrets == 2


def test_a_fragment_of_several_secrets_is_of_all() -> None:
    shared = noise(16)
    fragments = Fragments([shared, noise(16, 1), shared])
    assert fragments.owners[shared] == [0, 2]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(8, 900), min_size=1, max_size=5),
    before=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_is_there_is_found_at_any_place(
    lengths: list[int], before: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    secrets = [rng.bytes(length) for length in lengths]
    fragments = Fragments(secrets)
    content = b"\0".join([rng.bytes(before), *secrets, rng.bytes(9)])
    expected = {
        (place, fragment)
        for fragment in fragments.owners
        for place in range(len(content))
        if content.startswith(fragment, place)
    }
    assert set(found(fragments, content)) == expected
    provable = [one for i, one in enumerate(secrets) if i not in fragments.unprovable]
    assert {owner for _, one in expected for owner in fragments.owners[one]} == {
        secrets.index(one) for one in provable
    }
