"""Replies that no honest client sends: each is that client's failure."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from knnper.server.federation import FlowerFederation, Reply, Request, Step
from knnper.server.rounds import Tally, usable_updates
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport.messages import Packed, Purpose, pack
from tests.server.fake_grid import FakeGrid

pytestmark = pytest.mark.usefixtures("inside_a_run")

HONEST = ModelUpdate(torch.ones(2), 3, 0.5)


def packed() -> Packed:
    return pack(HONEST, None)


def layout(**fields: Any) -> str:
    """Return the honest update's layout, but for some fields."""
    honest = json.loads(str(packed().entry["layout"]))
    honest["structure"]["fields"].update(fields)
    return json.dumps(honest)


def shaped(shape: object) -> str:
    honest = json.loads(layout())
    honest["shapes"]["weights"] = shape
    return json.dumps(honest)


def numbers(values: Any) -> ArrayRecord:
    return ArrayRecord({"vector": Array(values)})


def said(layout: object, array: ArrayRecord | None = None) -> RecordDict:
    entry: Any = {"layout": layout}
    return RecordDict(
        {
            "reply.entry": ConfigRecord(entry),
            "reply.array": packed().array if array is None else array,
        }
    )


def ask(content: RecordDict, purpose: Purpose = Purpose.TRAIN) -> Reply:
    grid = FakeGrid(lambda message: Message(content, reply_to=message))
    (reply,) = federation(grid).exchange(
        Step(purpose, 1, [0]), [Request(("a",), ModelPayload(torch.ones(2)))]
    )
    return reply


def federation(grid: FakeGrid) -> FlowerFederation:
    return FlowerFederation(
        grid=grid,  # type: ignore[arg-type]
        choose_node=lambda _: 1,
        update_type=ModelUpdate,
        experiment="{}",
        run_folder="",
        shared_folder="",
        may_be_away=True,
    )


def promising() -> ArrayRecord:
    """Return an array whose bytes promise far more numbers than they have."""
    array = Array(np.ones(2, np.float32))
    head = array.data.replace(b"(2,), } ", b"(999999999,), }")
    return ArrayRecord({"vector": Array("float32", (2,), "numpy.ndarray", head)})


NONSENSE = {
    "no array": RecordDict({"reply.entry": ConfigRecord({"layout": layout()})}),
    "no entry": RecordDict({"reply.array": packed().array}),
    "entry of another kind": RecordDict(
        {"reply.entry": ArrayRecord(), "reply.array": ArrayRecord()}
    ),
    "no vector": said(layout(), ArrayRecord()),
    "layout of another kind": said(7),
    "layout of a list": said("[]"),
    "layout that is deep": said("[" * 100_000),
    "float64": said(layout(), numbers(np.ones(2))),
    "two axes": said(layout(), numbers(np.ones((1, 2), np.float32))),
    "too short": said(layout(), numbers(np.ones(1, np.float32))),
    "promises": said(layout(), promising()),
    "shape negative": said(shaped([-1, -2])),
    "shape huge": said(shaped([0, 2**100]), numbers(np.ones(0, np.float32))),
    "shape text": said(shaped("ab")),
    "weights text": said(layout(weights="x")),
    "tensor of another name": said(layout(weights={"tensor": "train_loss"})),
    "examples text": said(layout(num_examples="x")),
    "examples NaN": said(layout(num_examples=float("nan"))),
    "examples true": said(layout(num_examples=True)),
    "examples fractional": said(layout(num_examples=2.0)),
    "examples huge": said(layout(num_examples=10**400)),
    "loss text": said(layout(train_loss="x")),
    "loss nothing": said(layout(train_loss=None)),
    "field of another": said(layout(more=1)),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_the_client_s_failure(name: str) -> None:
    reply = ask(NONSENSE[name])
    assert reply.record is None
    assert reply.failure


def test_an_honest_reply_is_taken() -> None:
    assert ask(said(layout())).record.num_examples == 3


def test_an_update_is_no_evaluation() -> None:
    reply = ask(said(layout()), Purpose.VALIDATE)
    assert "expected a Evaluation, found a ModelUpdate" in str(reply.failure)


@pytest.mark.parametrize("in_memory", [False, True])
def test_no_file_of_the_server_is_read_or_moved(
    tmp_path: Path, in_memory: bool
) -> None:
    """Neither one elsewhere, nor one in the run's folder of another name."""
    (tmp_path / "run").mkdir()
    secrets = [tmp_path / "superlink.db", tmp_path / "run" / "ca.key"]
    for secret in secrets:
        secret.write_bytes(b"12345678")
        content = said(layout())
        content["reply.entry"]["file"] = str(secret)  # type: ignore[assignment]
        grid = FakeGrid(lambda message, it=content: Message(it, reply_to=message))  # type: ignore[misc]
        made = federation(grid)
        made.shared_folder = str(tmp_path / "run") if in_memory else ""
        request = Request(("a",), ModelPayload(torch.ones(2)))
        (reply,) = made.exchange(Step(Purpose.TRAIN, 1, [0]), [request])
        assert "names the file" in str(reply.failure)
        assert secret.read_bytes() == b"12345678"


def test_a_reply_far_larger_than_what_was_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("knnper.server.federation.LEAST_LIMIT_BYTES", 8)
    large = np.ones(10_000, np.float32)
    reply = ask(said(shaped([10_000]), numbers(large)))
    assert "expected at most 128 bytes, found 40" in str(reply.failure)


def test_what_a_client_says_of_its_failure_is_one_short_line() -> None:
    error = Error(code=2, reason="a\n2026 INFO all is well\x1b[2J" + "y" * 9999 + "end")
    grid = FakeGrid(lambda message: Message(error, reply_to=message))
    requests = [Request(("a",), ModelPayload(torch.ones(2)))]
    (reply,) = federation(grid).exchange(Step(Purpose.TRAIN, 1, [0]), requests)
    assert str(reply.failure).startswith("a\\n2026 INFO all is well\\x1b[2J")
    assert str(reply.failure).endswith("yend")
    assert len(str(reply.failure)) == 500


@pytest.mark.parametrize("found", [4, 10**18])
def test_no_update_weighs_more_than_the_client_s_examples(found: int) -> None:
    tally = Tally({"a": 3})
    tally.sends("a", ModelPayload(torch.ones(2)))
    update = ModelUpdate(torch.ones(2), found, 0.5)
    (used,) = usable_updates([Reply(("a",), update)], ModelUpdate, tally)
    assert used is not None
    assert used.update.num_examples == 3
    assert tally.failures == {}


def test_who_is_not_of_the_run_is_not_aggregated() -> None:
    tally = Tally({"a": 3})
    assert list(usable_updates([Reply(("b",), HONEST)], ModelUpdate, tally)) == [None]
    assert "takes no part in training" in tally.failures["b"]


@pytest.mark.parametrize("found", [0, -1, float("nan"), True, "3", 2.0])
def test_an_update_without_a_proper_weight_is_a_failure(found: Any) -> None:
    tally = Tally({"a": 3})
    tally.sends("a", ModelPayload(torch.ones(2)))
    update = ModelUpdate(torch.ones(2), found, 0.5)
    replies = [Reply(("a",), update), Reply(("a",), HONEST)]
    wrong, right = usable_updates(replies, ModelUpdate, tally)
    assert wrong is None
    assert right is not None
    assert "training example" in tally.failures["a"]


def test_a_loss_beyond_all_bounds_is_left_out() -> None:
    tally = SimpleNamespace(losses=[(2**50, 1e308), (1, 0.5), (1, float("nan"))])
    assert Tally.train_loss.fget(tally) == 0.5  # type: ignore[attr-defined]


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
