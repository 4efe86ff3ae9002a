import weakref

import torch

from knnper.server.federation import Reply
from knnper.server.rounds import Tally, usable_updates
from knnper.strategies.core.records import ModelPayload, ModelUpdate


def test_the_first_update_does_not_decide_alone_which_shape_is_right() -> None:
    tally = Tally({"a": 1, "b": 1})
    tally.sends("a", ModelPayload(torch.zeros(3)))
    replies = [
        Reply((client,), ModelUpdate(torch.ones(length), 1, 0.5))
        for client, length in (("a", 2), ("b", 3))
    ]
    wrong, right = usable_updates(replies, ModelUpdate, tally)
    assert wrong is None
    assert right is not None
    assert right.client == "b"
    assert tally.failures == {
        "a": "expected tensors of shapes {'weights': (3,)}, found {'weights': (2,)}"
    }


def test_what_was_sent_is_forgotten_once_it_is_answered() -> None:
    seen: list[object] = []

    def problem(payload: object, update: object) -> None:
        seen.append(payload)

    tally = Tally({"a": 1, "b": 1}, update_problem=problem)
    payloads = [ModelPayload(torch.zeros(2)) for _ in range(2)]
    marks = [weakref.ref(payload) for payload in payloads]
    for client in ("a", "b"):
        tally.sends(client, payloads.pop(0))
    answers = [Reply(("a",), ModelUpdate(torch.ones(2), 1, 0.5)), Reply(("b",), None)]
    assert len(list(usable_updates(answers[:1], ModelUpdate, tally))) == 1
    assert seen.pop() is marks[0]()
    assert list(usable_updates(answers[1:], ModelUpdate, tally)) == [None]
    tally.sends("c", ModelPayload(torch.zeros(2)))
    assert [mark() for mark in marks] == [None, None]
