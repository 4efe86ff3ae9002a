import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from knnper.seeding import RandomKey


def test_torch_is_seeded_inside_the_block_only() -> None:
    before = torch.get_rng_state()
    with RandomKey(1).child("dropout").torch():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with RandomKey(1).child("dropout").torch():
        assert torch.equal(torch.rand(3), first)
    with RandomKey(1).child("other").torch():
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(("in_use", "restored"), [(True, [0, 1]), (False, [])])
def test_the_generators_of_gpus_in_use_are_restored(
    monkeypatch: pytest.MonkeyPatch, in_use: bool, restored: list[int]
) -> None:
    asked: list[int] = []

    @contextlib.contextmanager
    def fork(devices: Sequence[int]) -> Iterator[None]:
        asked.extend(devices)
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    with RandomKey(1).torch():
        pass
    assert asked == restored
