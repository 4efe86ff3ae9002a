import torch

from server.federation import Reply
from server.validation import Tally, usable_updates
from strategies.core.records import ModelPayload, ModelUpdate


def test_the_first_update_does_not_decide_alone_which_shape_is_right() -> None:
    tally = Tally({"a": 1, "b": 1})
    tally.sends("a", ModelPayload(torch.zeros(3)))
    replies = [
        Reply((client,), ModelUpdate(torch.ones(length), 1, 0.5))
        for client, length in (("a", 2), ("b", 3))
    ]
    used = [client for client, _ in usable_updates(replies, ModelUpdate, tally)]
    assert used == ["b"]
    assert tally.failures == {
        "a": "expected tensors of shapes {'weights': (3,)}, found {'weights': (2,)}"
    }
