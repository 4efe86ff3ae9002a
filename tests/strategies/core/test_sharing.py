import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError
from knnper.strategies.core.records import ModelState
from knnper.strategies.core.sharing import SharedUpdate, Sharing
from knnper.strategies.core.training import LocalResult

ODD = Sharing(torch.tensor([False, True, False, True]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
def test_what_was_split_is_joined_again(shared: list[bool]) -> None:
    sharing = Sharing(torch.tensor(shared))
    trained = torch.arange(len(shared), dtype=torch.float32)
    part, update = sharing.split(LocalResult(trained, 3, 0.5), num_examples=7)
    assert len(part.personal) + len(update.shared) == len(shared)
    assert (update.num_examples, update.train_loss) == (7, 0.5)
    server = sharing.average(ModelState(-trained), iter([("a", update)]))
    assert torch.equal(sharing.join(server.weights, part), trained)
    assert torch.equal(server.weights, trained.where(sharing.shared, -trained))


def test_a_mean_covers_the_shared_part() -> None:
    state = ModelState(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    updates = [
        ("a", SharedUpdate(torch.tensor([1.0, 2.0]), 3, 0.5)),
        ("b", SharedUpdate(torch.tensor([5.0, -2.0]), 1, 0.5)),
    ]
    # (3 · 1 + 5) / 4 = 2 and (3 · 2 - 2) / 4 = 1.
    assert ODD.average(state, iter(updates)).weights.tolist() == [5, 2, 7, 1]
    assert state.weights.tolist() == [5, 6, 7, 8]


def test_without_a_part_the_servers_is_taken() -> None:
    weights = torch.arange(4.0)
    assert ODD.join(weights, None) is weights


def test_something_must_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"no weight would be shared.*method local"):
        Sharing(torch.zeros(4, dtype=torch.bool))
