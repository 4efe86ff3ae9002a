import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.core.sharing import PartlyShared, SharedUpdate
from knnper.strategies.core.training import LocalResult
from tests.strategies.tiny import linear_task


def sharing(*shared: bool) -> PartlyShared:
    return PartlyShared(linear_task(), NoSettings(), torch.tensor(shared), 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
def test_what_was_split_is_joined_again(shared: list[bool]) -> None:
    method, trained = sharing(*shared), torch.arange(len(shared), dtype=torch.float32)
    part, update = method.split(LocalResult(trained, 3, 0.5), num_examples=7)
    assert len(part.personal) + len(update.shared) == len(shared)
    assert (update.num_examples, update.train_loss) == (7, 0.5)
    server = method.aggregate(ModelState(-trained), iter([("a", update)]))
    assert torch.equal(method.joined(server.weights, part), trained)
    assert torch.equal(server.weights, trained.where(method.shared, -trained))
    assert method.joined(trained, None) is trained


def test_a_mean_covers_the_shared_part() -> None:
    state = ModelState(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    updates = [
        ("a", SharedUpdate(torch.tensor([1.0, 2.0]), 3, 0.5)),
        ("b", SharedUpdate(torch.tensor([5.0, -2.0]), 1, 0.5)),
    ]
    # (3 · 1 + 5) / 4 = 2 and (3 · 2 - 2) / 4 = 1.
    after = sharing(False, True, False, True).aggregate(state, iter(updates))
    assert after.weights.tolist() == [5, 2, 7, 1]


def test_something_must_be_shared() -> None:
    with pytest.raises(ConfigError, match="no weight would be shared"):
        sharing(False, False)
