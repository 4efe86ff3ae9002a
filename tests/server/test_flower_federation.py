"""The federation against a grid of functions, honest and not."""

import functools
import json
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from torch import Tensor

from knnper.errors import RunError
from knnper.records import Flat, flatten
from knnper.server.federation import Reply, Request, Step
from knnper.server.flower_federation import EXPIRES_LATER_S, FlowerFederation
from knnper.server.screening import UpdateChecks
from knnper.server.tally import Tally
from knnper.server.task_size import TASK_S, TaskSize
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport import polling
from knnper.transport.messages import (
    FAILURES,
    IN_MESSAGE,
    TOGETHER,
    CannotRunError,
    Carrier,
    Files,
    Job,
    Packed,
    Purpose,
    job_of,
    pack,
    pack_together,
    packed_of,
    reply_name,
    to_content,
    unpack,
)
from knnper.transport.polling import Interrupted, Pace, Patience
from tests.server.fake_grid import Answer, FakeGrid

pytestmark = pytest.mark.usefixtures("inside_a_run")
WEIGHTS = torch.linspace(0, 1, 50)


def asked(message: Message) -> tuple[Job, Carrier, Tensor]:
    """Return the job, how its numbers travel, and the weights that were sent."""
    job = job_of(message.content)
    packed = packed_of(message.content, "payload")
    assert packed is not None
    carrier = carrier_of(job.shared_folder)
    return job, carrier, unpack(ModelPayload, packed, carrier).weights


def carrier_of(folder: str) -> Carrier:
    return Files(Path(folder), least_bytes=0) if folder else IN_MESSAGE


def add_client_number(message: Message) -> Message:
    """Return the payload's weights plus the client's number."""
    job, carrier, weights = asked(message)
    update = ModelUpdate(weights + int(job.clients[0]), 1, 0.5)
    content = to_content(None, {"reply": pack(update, carrier)})
    return Message(content, reply_to=message)


def but_the_second(reply: Answer) -> Answer:
    """Answer as asked, but for the client 2."""

    def answer(message: Message) -> Message | None:
        is_second = job_of(message.content).clients == ["2"]
        return (reply if is_second else add_client_number)(message)

    return answer


def failing(error: Error) -> Answer:
    return lambda message: Message(error, reply_to=message)


def federation(answer: Answer, shared_folder: str = "", **other: Any) -> Any:
    grid = FakeGrid(answer)
    flower_federation = FlowerFederation(
        grid=grid,  # type: ignore[arg-type]
        choose_node={"1": 11, "2": 12, "3": 11}.__getitem__,
        update_type=ModelUpdate,
        experiment="{}",
        run_folder="runs/x",
        carrier=carrier_of(shared_folder),
        **other,
    )
    return SimpleNamespace(grid=grid, federation=flower_federation)


def under_way(grid: FakeGrid) -> int:
    return len(grid.messages) - grid.num_answered


def ask(flower_federation: FlowerFederation, clients: str = "123") -> list[Reply]:
    requests = (Request((client,), ModelPayload(WEIGHTS)) for client in clients)
    return list(flower_federation.exchange(Step(Purpose.TRAIN, 4, [2]), requests))


@pytest.mark.parametrize("in_memory", [False, True])
def test_replies_come_in_the_order_of_the_requests(
    tmp_path: Path, in_memory: bool
) -> None:
    clients = federation(add_client_number, str(tmp_path) if in_memory else "")
    replies = ask(clients.federation)
    assert [reply.client for reply in replies] == ["1", "2", "3"]
    for number, reply in enumerate(replies, start=1):
        assert torch.equal(reply.record.weights, WEIGHTS + number)
    nodes = [message.metadata.dst_node_id for message in clients.grid.messages.values()]
    assert nodes == [11, 12, 11]
    in_use = [path for path in tmp_path.iterdir() if path.suffix != ".free"]
    assert in_use == [], "files in memory must not outlive a round"


def test_the_same_model_is_written_once(tmp_path: Path) -> None:
    seen: set[str] = set()

    def answer(message: Message) -> Message:
        seen.update(str(path) for path in tmp_path.glob("*.f32"))
        return Message(Error(code=2, reason="not today"), reply_to=message)

    ask(federation(answer, str(tmp_path)).federation)
    assert len(seen) == 1


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (2, 2), (64, 3)])
def test_no_more_requests_are_under_way_than_allowed(at_once: int, most: int) -> None:
    seen: list[int] = []

    def answer(message: Message) -> Message:
        # The one that is being answered is not under way any more.
        seen.append(under_way(clients.grid) + 1)
        return add_client_number(message)

    clients = federation(answer, at_once=at_once)
    assert len(ask(clients.federation)) == 3
    assert max(seen) == most


def test_payloads_that_differ_are_given_back_when_they_are_answered(
    tmp_path: Path,
) -> None:
    """Only as many files are ever made as requests are under way."""
    in_use: list[int] = []

    def answer(message: Message) -> Message:
        in_use.append(len(list(tmp_path.glob("*.f32"))))
        return Message(Error(code=2, reason="not today"), reply_to=message)

    flower_federation = federation(answer, str(tmp_path), at_once=2).federation
    requests = (
        Request((client,), ModelPayload(torch.full((50,), float(number))))
        for number, client in enumerate("123123123123")
    )
    assert (
        len(list(flower_federation.exchange(Step(Purpose.TRAIN, 4, [2]), requests)))
        == 12
    )
    assert max(in_use) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_client_that_raises_is_a_failure() -> None:
    answer = but_the_second(failing(Error(code=2, reason="boom")))
    replies = ask(federation(answer).federation)
    assert [reply.failure for reply in replies] == [None, "boom", None]


def test_an_empty_reply_is_a_failure() -> None:
    clients = federation(lambda message: Message(RecordDict(), reply_to=message))
    (reply,) = ask(clients.federation, "1")
    assert (reply.record, reply.failure) == (None, "the reply is empty")


@pytest.mark.parametrize(
    "error", [Error(code=0, reason="?"), Error(code=2, reason="ActorDiedError")]
)
def test_a_dead_worker_ends_the_run(error: Error) -> None:
    with pytest.raises(RunError, match="a worker process died"):
        ask(federation(failing(error)).federation)


def test_a_worker_that_is_set_up_wrongly_ends_the_run() -> None:
    reason = f"<class 'X'>:<'{CannotRunError('no data')}'>"
    with pytest.raises(RunError, match=r"no client can be run on .*: no data$"):
        ask(federation(failing(Error(code=2, reason=reason))).federation)


def test_a_slow_client_does_not_hold_up_the_others() -> None:
    """The first is answered only when all others have been, two at a time."""

    class SlowFirst(FakeGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            requested = list(message_ids)
            if self.num_answered < 5 and "message-0" in requested:
                requested.remove("message-0")
            return super().pull_messages(requested)

    clients = federation(add_client_number, at_once=2)
    clients.federation.grid = SlowFirst(add_client_number)
    replies = ask(clients.federation, "123123")
    assert [reply.client for reply in replies] == list("123123")
    assert all(reply.failure is None for reply in replies)


def test_waiting_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        ask(federation(add_client_number, stop=stop).federation)


def test_a_reply_that_is_late_is_a_failure_and_the_others_count() -> None:
    paces = {Purpose.TRAIN: Pace(0.3, patience=10.0)}
    clients = federation(but_the_second(lambda _: None), paces=paces)
    first, late, last = ask(clients.federation)
    assert late.failure == "no answer within 0.3 s"
    assert [first.failure, last.failure] == [None, None]
    message = next(iter(clients.grid.messages.values()))
    assert job_of(message.content).timeout_s == 0.3, "the client must know, too"
    assert message.metadata.ttl == 0.3 + EXPIRES_LATER_S


def test_a_silent_client_is_given_up_once_the_others_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first round too, and however long the operator would wait."""
    monkeypatch.setattr(polling, "LEAST_S", 0.2)

    paces = {Purpose.TRAIN: Pace(3600.0, patience=1.0)}
    clients = federation(but_the_second(lambda _: None), paces=paces)
    first, silent, last = ask(clients.federation)
    assert "no answer within" in str(silent.failure)
    assert [first.failure, last.failure] == [None, None]
    ask(clients.federation)
    timeouts = [
        job_of(message.content).timeout_s for message in clients.grid.messages.values()
    ]
    assert timeouts[:3] == [3600.0] * 3
    assert max(timeouts[3:]) < 60, "what it takes is known from the round before"


def a_round(pace: Pace, **seconds: float | None) -> None:
    """Let each node answer after some seconds, or with an error if None."""
    pace.begin()
    for _ in seconds:
        pace.sent()
    for node, duration in seconds.items():
        if duration is None:
            pace.failed()
        else:
            pace.answered(ord(node), duration)


def waited_for(pace: Pace, node: str) -> float:
    return pace.timeout_s(ord(node))


def test_how_long_a_reply_is_waited_for() -> None:
    pace = Pace(2000.0, patience=10.0)
    pace.begin()
    for _ in range(4):
        pace.sent()
    for node, seconds in (("a", 5.0), ("b", 1.0)):
        pace.answered(ord(node), seconds)
    assert waited_for(pace, "d") == 2000, "two of four are not most of them"
    pace.answered(ord("c"), 8.0)
    assert waited_for(pace, "a") == 30 + 10 * 8
    # It has not answered yet, so its work may be ten times that of the others.
    assert waited_for(pace, "d") == 30 + 100 * 8
    pace.begin()
    # Of what has answered: 1, 5, 8.
    assert waited_for(pace, "a") == 30 + 10 * 5
    a_round(pace, a=300.0)
    assert waited_for(pace, "a") == 2000, "never longer"
    for _ in range(6):
        a_round(pace, a=0.1)
    assert waited_for(pace, "a") == 31, "what was long ago is forgotten"


def test_immediate_failure_does_not_shorten_the_expected_time() -> None:
    pace = Pace(1000.0, patience=10.0)
    a_round(pace, a=None, b=None)
    assert waited_for(pace, "c") == 1000
    a_round(pace, a=None, b=None, c=7.0)
    assert waited_for(pace, "c") == 100


@pytest.mark.parametrize("slow_s", [3.0, 90.0, 1000.0])
def test_a_slow_client_is_waited_for(slow_s: float) -> None:
    pace = Pace(3600.0, patience=10.0)
    for _ in range(5):
        a_round(pace, a=1.0, b=1.0, c=slow_s)
        assert waited_for(pace, "c") >= min(30 + 3 * slow_s, 3600)
        assert waited_for(pace, "a") == 40


def test_repeatedly_silent_client_times_out_with_the_others() -> None:
    pace = Pace(3600.0, patience=10.0)
    a_round(pace, a=1.0, b=1.0, c=100.0)
    waited = []
    for _ in range(7):
        waited.append(waited_for(pace, "c"))
        pace.given_up(ord("c"))
    assert waited == [330, 180, 105, 67.5, 48.75, 40, 40]
    a_round(pace, a=1.0, b=1.0, c=50.0)
    assert waited_for(pace, "c") == 180, "it is back"


def test_of_clients_that_may_be_away_one_cannot_end_the_run() -> None:
    error = Error(code=0, reason=str(CannotRunError("the data is gone")))
    answer = but_the_second(failing(error))
    first, absent, last = ask(federation(answer, may_be_away=True).federation)
    assert "the data is gone" in str(absent.failure)
    assert [first.failure, last.failure] == [None, None]


def test_a_reply_that_flower_cannot_read_is_that_clients_failure() -> None:
    def unreadable_reply(message: Message) -> Message:
        raise ValueError("the arrays are not what they say")

    answer = but_the_second(unreadable_reply)
    clients = federation(answer, may_be_away=True, patience=Patience(may_be_away=True))
    first, unreadable, last = ask(clients.federation)
    assert "the reply cannot be read: ValueError" in str(unreadable.failure)
    assert [first.failure, last.failure] == [None, None]
    with pytest.raises(ValueError, match="what they say"):
        ask(federation(answer).federation)


HONEST = ModelUpdate(torch.ones(2), 3, 0.5)


def packed() -> Packed:
    return pack(HONEST)


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


def reply_content(layout: object, array: ArrayRecord | None = None) -> RecordDict:
    entry: Any = {"layout": layout}
    return RecordDict(
        {
            "reply.entry": ConfigRecord(entry),
            "reply.array": packed().array if array is None else array,
        }
    )


def reply_with(
    content: RecordDict | Error, purpose: Purpose = Purpose.TRAIN, folder: str = ""
) -> Reply:
    """Return the server's view of a client's answer."""

    def answer(message: Message) -> Message:
        return Message(content, reply_to=message)

    flower_federation = federation(answer, folder, may_be_away=True).federation
    request = Request(("1",), ModelPayload(torch.ones(2)))
    (reply,) = flower_federation.exchange(Step(purpose, 1, [0]), [request])
    assert isinstance(reply, Reply)
    return reply


def promising() -> ArrayRecord:
    """Return an array whose header names far more numbers than follow."""
    array = Array(np.ones(2, np.float32))
    head = array.data.replace(b"(2,), } ", b"(999999999,), }")
    return ArrayRecord({"vector": Array("float32", (2,), "numpy.ndarray", head)})


NONSENSE = {
    "no array": RecordDict({"reply.entry": ConfigRecord({"layout": layout()})}),
    "no entry": RecordDict({"reply.array": packed().array}),
    "entry of another kind": RecordDict(
        {"reply.entry": ArrayRecord(), "reply.array": ArrayRecord()}
    ),
    "no vector": reply_content(layout(), ArrayRecord()),
    "layout of another kind": reply_content(7),
    "layout of a list": reply_content("[]"),
    "layout that is deep": reply_content("[" * 100_000),
    "float64": reply_content(layout(), numbers(np.ones(2))),
    "two axes": reply_content(layout(), numbers(np.ones((1, 2), np.float32))),
    "too short": reply_content(layout(), numbers(np.ones(1, np.float32))),
    "promises": reply_content(layout(), promising()),
    "shape negative": reply_content(shaped([-1, -2])),
    "shape huge": reply_content(shaped([0, 2**100]), numbers(np.ones(0, np.float32))),
    "shape text": reply_content(shaped("ab")),
    "weights text": reply_content(layout(weights="x")),
    "tensor of another name": reply_content(layout(weights={"tensor": "train_loss"})),
    "examples huge": reply_content(layout(num_examples=10**400)),
    "loss text": reply_content(layout(train_loss="x")),
    "field of another": reply_content(layout(more=1)),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_the_client_s_failure(name: str) -> None:
    reply = reply_with(NONSENSE[name])
    assert reply.record is None
    assert reply.failure


def test_an_honest_reply_is_taken() -> None:
    assert reply_with(reply_content(layout())).record.num_examples == 3


def test_an_update_is_no_evaluation() -> None:
    reply = reply_with(reply_content(layout()), Purpose.VALIDATE)
    assert "expected a Validation, found a ModelUpdate" in str(reply.failure)


@pytest.mark.parametrize("in_memory", [False, True])
def test_no_file_of_the_server_is_read_or_moved(
    tmp_path: Path, in_memory: bool
) -> None:
    """Neither one elsewhere, nor one in the run's folder of another name."""
    (tmp_path / "run").mkdir()
    secrets = [tmp_path / "superlink.db", tmp_path / "run" / "ca.key"]
    for secret in secrets:
        secret.write_bytes(b"12345678")
        content = reply_content(layout())
        content["reply.entry"]["file"] = str(secret)  # type: ignore[assignment]
        folder = str(tmp_path / "run") if in_memory else ""
        reply = reply_with(content, folder=folder)
        assert "names the file" in str(reply.failure)
        assert secret.read_bytes() == b"12345678"


def test_a_reply_far_larger_than_what_was_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("knnper.transport.polling.LEAST_LIMIT_BYTES", 8)
    large = np.ones(10_000, np.float32)
    reply = reply_with(reply_content(shaped([10_000]), numbers(large)))
    assert "expected at most 128 bytes, found 40" in str(reply.failure)


def test_failure_reported_by_a_client_is_one_short_line() -> None:
    error = Error(code=2, reason="a\n2026 INFO all is well\x1b[2J" + "y" * 9999 + "end")
    reply = reply_with(error)
    assert str(reply.failure).startswith("a\\n2026 INFO all is well\\x1b[2J")
    assert str(reply.failure).endswith("yend")
    assert len(str(reply.failure)) == 500


def checks_of(num_train: dict[str, int]) -> tuple[UpdateChecks, dict[str, str]]:
    """Return the checks of a round, and a place for reasons by client."""
    return UpdateChecks(num_train, ModelUpdate), {}


@pytest.mark.parametrize("claimed", [4, 10**18])
def test_no_update_weighs_more_than_the_client_s_examples(claimed: int) -> None:
    checks, failures = checks_of({"a": 3})
    checks.note_sent("a", ModelPayload(torch.ones(2)))
    update = ModelUpdate(torch.ones(2), claimed, 0.5)
    (used,) = checks.usable([Reply(("a",), update)], failures.__setitem__)
    assert used is not None
    assert used.update.num_examples == 3
    assert failures == {}


def test_client_outside_the_run_is_not_aggregated() -> None:
    checks, failures = checks_of({"a": 3})
    usable = checks.usable([Reply(("b",), HONEST)], failures.__setitem__)
    assert list(usable) == [None]
    assert "takes no part in it" in failures["b"]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), True, "3", 2.0])
def test_an_update_without_a_proper_weight_is_a_failure(weight: Any) -> None:
    checks, failures = checks_of({"a": 3})
    checks.note_sent("a", ModelPayload(torch.ones(2)))
    update = ModelUpdate(torch.ones(2), weight, 0.5)
    replies = [Reply(("a",), update), Reply(("a",), HONEST)]
    wrong, right = checks.usable(replies, failures.__setitem__)
    assert wrong is None
    assert right is not None
    assert "training example" in failures["a"]


def test_a_loss_beyond_all_bounds_is_left_out() -> None:
    tally = SimpleNamespace(losses=[(2**50, 1e308), (1, 0.5), (1, float("nan"))])
    assert Tally.train_loss.fget(tally) == 0.5  # type: ignore[attr-defined]


def test_the_first_update_does_not_decide_alone_which_shape_is_right() -> None:
    checks, failures = checks_of({"a": 1, "b": 1})
    checks.note_sent("a", ModelPayload(torch.zeros(3)))
    replies = [
        Reply((client,), ModelUpdate(torch.ones(length), 1, 0.5))
        for client, length in (("a", 2), ("b", 3))
    ]
    wrong, right = checks.usable(replies, failures.__setitem__)
    assert wrong is None
    assert right is not None
    assert right.client == "b"
    assert failures == {
        "a": "expected tensors of shapes {'weights': (3,)}, found {'weights': (2,)}"
    }


def test_payload_is_released_after_its_reply() -> None:
    seen: list[object] = []

    def problem(payload: object, update: object) -> None:
        seen.append(payload)

    checks, failures = checks_of({"a": 1, "b": 1})
    checks.update_problem = problem
    payloads = [ModelPayload(torch.zeros(2)) for _ in range(2)]
    marks = [weakref.ref(payload) for payload in payloads]
    for client in ("a", "b"):
        checks.note_sent(client, payloads.pop(0))
    answers = [Reply(("a",), ModelUpdate(torch.ones(2), 1, 0.5)), Reply(("b",), None)]
    assert len(list(checks.usable(answers[:1], failures.__setitem__))) == 1
    assert seen.pop() is marks[0]()
    assert list(checks.usable(answers[1:], failures.__setitem__)) == [None]
    checks.note_sent("c", ModelPayload(torch.zeros(2)))
    assert [mark() for mark in marks] == [None, None]


def train_each(message: Message, *, as_one: bool = False) -> Message:
    """Answer for all clients of a task; 2 cannot be trained."""
    job, carrier, weights = asked(message)
    replies, failures = {}, {}
    flats: dict[int, Flat] = {}
    for number, client in enumerate(job.clients):
        if client == "2":
            failures[str(number)] = "no data today"
            continue
        update = ModelUpdate(weights + int(client), job.state_rounds[number], 0)
        if as_one and len(job.clients) > 1:
            flats[number] = flatten(update)
        else:
            replies[reply_name(number)] = pack(update, carrier)
    if flats:
        replies[TOGETHER] = pack_together(flats, carrier)
    content = to_content(None, replies)
    content[FAILURES] = ConfigRecord(dict(failures))
    return Message(content, reply_to=message)


@pytest.mark.parametrize("as_one", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_clients_of_one_task_reply_each_for_itself(
    tmp_path: Path, in_memory: bool, as_one: bool
) -> None:
    size = TaskSize(num_workers=1, num_clients=2)
    folder = str(tmp_path) if in_memory else ""
    answer = functools.partial(train_each, as_one=as_one)
    clients = federation(answer, folder, task_size=size)
    requests = [
        Request((client,), ModelPayload(WEIGHTS), state_rounds=(number,))
        for number, client in enumerate("32113", start=5)
    ]
    # Of the last two the second is sent something else.
    requests[-1] = replace(requests[-1], payload=ModelPayload(WEIGHTS + 10))
    replies = list(clients.federation.exchange(Step(Purpose.TRAIN, 4, [2]), requests))
    tasks = [
        job_of(message.content).clients for message in clients.grid.messages.values()
    ]
    assert tasks == [["3", "2"], ["1", "1"], ["3"]]
    assert [reply.client for reply in replies] == list("32113")
    assert [reply.failure for reply in replies] == [None, "no data today", *[None] * 3]
    trained = [reply.record for reply in replies if reply.record is not None]
    assert [reply.num_examples for reply in trained] == [5, 7, 8, 9]
    for update, moved in zip(trained, [3, 1, 1, 13], strict=True):
        assert torch.equal(update.weights, WEIGHTS + moved)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".free"] == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"lengths": [50]}, "expected numbers and lengths of 2 records, together 100"),
        ({"lengths": [-1, 101]}, "and [-1, 101]"),
        ({"layout": ["{}"]}, "expected numbers and lengths of 1 records"),
        ({"numbers": ["0", "1"]}, "found ['0', '1'] and [50, 50]"),
        ({"numbers": "0"}, "expected numbers of records, found '0'"),
        ({"layout": ["{}", "{}"]}, "expected the shapes of a record"),
    ],
)
def test_replies_that_do_not_fit_are_the_failure_of_all(
    damage: dict[str, Any], reason: str
) -> None:
    def answer(message: Message) -> Message:
        reply = train_each(message, as_one=True)
        for key, value in damage.items():
            reply.content.config_records["together.entry"][key] = value
        return reply

    size = TaskSize(num_workers=1, num_clients=2)
    payload = ModelPayload(WEIGHTS)
    requests = [Request((client,), payload, state_rounds=(1,)) for client in "13"]
    flower_federation = federation(answer, task_size=size).federation
    replies = list(flower_federation.exchange(Step(Purpose.TRAIN, 4, [2]), requests))
    assert [reply.client for reply in replies] == ["1", "3"]
    for failed in replies:
        assert reason in str(failed.failure)


def test_a_task_that_fails_is_the_failure_of_all_its_clients() -> None:
    size = TaskSize(num_workers=1, num_clients=3)
    answer = failing(Error(code=2, reason="boom"))
    replies = ask(federation(answer, task_size=size).federation)
    assert [(reply.client, reply.failure) for reply in replies] == [
        (client, "boom") for client in "123"
    ]


@pytest.mark.parametrize(
    ("num_clients", "seconds", "expected"),
    [
        (48, 48 * 0.06 / 2, 4),  # two workers, 60 ms a client: 4 take TASK_S
        (16, 16 * 0.05 / 2, 2),  # each worker has four tasks at least
        (7, 0.001, 1),
        (1000, 1000 * 0.4 / 2, 1),  # longer than TASK_S
        (0, 0.0, 1),
    ],
)
def test_a_task_is_as_long_as_a_message_is_short_beside_it(
    num_clients: int, seconds: float, expected: int
) -> None:
    assert TASK_S == 0.25
    size = TaskSize(num_workers=2)
    size.note(num_clients, seconds)
    assert size.num_clients == expected


def test_tasks_grow_in_the_first_round() -> None:
    size = TaskSize(num_workers=2)
    size.note_first(0, 0.1)
    assert size.num_clients == 1
    size.note_first(10, 0.25)  # two workers, 50 ms a client: 5 take TASK_S
    assert size.num_clients == 5
    size.note_first(12, 0.03)  # more would fit than have been trained so far
    assert size.num_clients == 12
    size.note(1000, 1000 * 0.05 / 2)
    size.note_first(900, 0.1)  # not of the first round
    assert size.num_clients == 5


def test_each_client_of_a_growing_round_is_trained_once() -> None:
    clients = federation(train_each, task_size=TaskSize(num_workers=1), at_once=2)
    names, payload = "13" * 50, ModelPayload(WEIGHTS)
    requests = (Request((name,), payload, state_rounds=(0,)) for name in names)
    replies = list(clients.federation.exchange(Step(Purpose.TRAIN, 4, [2]), requests))
    assert "".join(reply.client for reply in replies) == names
    tasks = [
        job_of(message.content).clients for message in clients.grid.messages.values()
    ]
    assert [client for task in tasks for client in task] == list(names)
    assert len(tasks[0]) == 1 < len(tasks[-2])


@pytest.mark.parametrize(
    ("num_clients", "each_s", "expected"),
    [
        # Half of what each of two workers has left, from two clients down to one.
        (20, 0.08, [2] * 7 + [1] * 6),
        # None is shorter than SHORTEST_TASK_S, which is ten clients here.
        (400, 0.003, [50] * 5 + [37, 28, 21, 16, 12, 10, 10, 10, 6]),
    ],
)
def test_the_last_tasks_of_a_round_are_shorter(
    num_clients: int, each_s: float, expected: list[int]
) -> None:
    size = TaskSize(num_workers=2)
    size.note(num_clients, num_clients * each_s / 2)
    payload = ModelPayload(WEIGHTS)
    requests = [
        Request((str(number),), payload, state_rounds=(0,))
        for number in range(num_clients)
    ]
    tasks = [task.clients for task in size.joined(requests)]
    assert [client for task in tasks for client in task] == [
        str(number) for number in range(num_clients)
    ]
    assert [len(task) for task in tasks] == expected
