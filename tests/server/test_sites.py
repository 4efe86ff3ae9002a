"""Clients that are behind the nodes of a fake grid."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

from knnper.errors import RunError
from knnper.experiment import FederationSettings
from knnper.server import sites
from knnper.server.federation import Reply, Request, Step
from knnper.server.link.authorized import Registered
from knnper.server.sites import Directory, SiteFederation
from knnper.transport.messages import Introduction, Purpose, introduction_content
from tests.server.fake_grid import FakeGrid


def roster(
    names: dict[int, str], fixed: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Registered]:
    """Return who is registered, by node."""
    return {
        str(node): Registered(name, "", "folder", fixed.get(name))
        for node, name in names.items()
    }


class People:
    """Who is behind which node; other answers than who they are may be set."""

    def __init__(self, names: dict[int, str]) -> None:
        self.said = {
            node: Introduction(name, num_train=10 * node, num_validation=2, num_test=1)
            for node, name in names.items()
        }
        self.asked: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.grid = FakeGrid(self.answer, names)

    def change(self, node: int, **said: object) -> None:
        self.said[node] = replace(self.said[node], **said)  # type: ignore[arg-type]

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        assert message.metadata.message_type == Purpose.INTRODUCE.value
        self.asked.append(node)
        said = self.said.get(node)
        if said is None:
            error = Error(code=2, reason="no such file")
            return Message(error, reply_to=message)
        return Message(introduction_content(said), reply_to=message)

    def notices(self) -> list[tuple[int, str]]:
        """Return which nodes were told that they are refused, and why."""
        told = [
            message
            for message in self.grid.messages.values()
            if message.metadata.message_type == Purpose.REFUSE.value
        ]
        return [(one.metadata.dst_node_id, _reason(one.content)) for one in told]


def _reason(content: RecordDict) -> str:
    return str(content.config_records["refusal"]["reason"])


pytestmark = pytest.mark.usefixtures("inside_a_run")


def directory(people: People, registered: dict[int, str] | None = None) -> Directory:
    made = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    look(made)
    return made


def look(made: Directory) -> None:
    """Ask who is new, and hear what they say: the grid answers at the second look."""
    for _ in range(3):
        made.refresh()


def test_what_a_client_says_it_has_is_a_claim_unless_the_operator_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    people = People({1: "a", 2: "b", 3: "c", 4: "d"})
    people.change(1, num_train=2**53)
    people.change(3, num_train=0)
    fixed = {"a": 700, "b": 20, "c": 30}
    known = roster({1: "a", 2: "b", 3: "c", 4: "d"}, fixed)
    made = Directory(people.grid, "{}", lambda: known)  # type: ignore[arg-type]
    look(made)
    found = made.members()
    numbers = {name: (one.num_train, one.is_claim) for name, one in found.items()}
    assert numbers == {
        "a": (700, False),
        "b": (20, False),
        "c": (0, False),  # it has nothing to train on
        "d": (40, True),
    }
    warned = [one for one in caplog.messages if "the operator fixed" in one]
    assert len(warned) == 2


def test_a_client_is_asked_once_and_forgotten_when_it_leaves() -> None:
    people = People({1: "a", 2: "b"})
    found = directory(people)
    people.grid.nodes = {2}
    look(found)
    assert (list(found.members()), found.node_of("a")) == (["b"], None)
    people.grid.nodes = {1, 2}
    look(found)
    assert found.node_of("a") == 1
    assert sorted(people.asked) == [1, 2]
    people.said[7], people.grid.nodes = people.said[1], {2, 7}
    look(found)
    assert found.node_of("a") == 7, "it is the same client behind another node"


def test_a_name_that_is_taken_is_refused_and_both_sides_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    people = People({1: "a", 2: "a"})
    found = directory(people)
    assert found.node_of("a") == 1
    ((node, reason),) = people.notices()
    assert node == 2
    assert "the name is taken by node 1" in reason
    assert reason in caplog.text


def test_a_key_goes_by_the_name_it_is_registered_under() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    found = directory(people, {1: "a", 2: "a2"})
    assert list(found.members()) == ["a"]
    told = dict(people.notices())
    assert "its key is registered as a2, and it calls itself b" in told[2]
    assert "its key is not registered under any name" in told[3]


def test_a_site_that_cannot_take_part_says_why_and_is_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = People({1: "a"})
    people.change(1, problem="unknown label 'cta'")
    found = directory(people)
    assert found.members() == {}
    assert "client a (node 1) cannot take part: unknown label 'cta'" in caplog.text
    assert list(found.refused())
    people.change(1, problem="")
    look(found)
    assert found.members() == {}, "not at once: reading data takes time"
    monkeypatch.setattr(sites, "ASK_AGAIN_S", 0.0)
    again = directory(people)
    assert list(again.members()) == ["a"]


def test_who_still_cannot_take_part_is_told_again_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "ASK_AGAIN_S", 0.0)
    people = People({1: "a"})
    people.change(1, problem="unknown label 'cta'")
    found = directory(people)
    look(found)
    assert len(people.notices()) == 1
    monkeypatch.setattr(sites, "REMIND_S", -1.0)
    found = directory(people)
    told = len(people.notices())
    look(found)
    assert len(people.notices()) > told


def test_a_node_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    people = People({1: "a"})
    people.grid.nodes.add(9)
    assert list(directory(people).members()) == ["a"]
    assert "node 9 did not introduce itself: no such file" in caplog.text


def test_one_that_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    people = People({1: "a", 2: "b"})
    answer = people.grid.answer
    people.grid.answer = lambda one: (
        None if one.metadata.dst_node_id == 2 else answer(one)
    )
    found = directory(people, {1: "a", 2: "b"})
    assert list(found.members()) == ["a"]
    assert (found.is_silent("a"), found.is_silent("b")) == (False, True)
    monkeypatch.setattr(sites, "TIMEOUT_S", 0.0)
    look(found)
    assert list(found.refused()) == [
        "node 2 did not introduce itself: no answer within 0 s"
    ]


def test_a_key_may_be_registered_while_the_run_goes_on() -> None:
    people = People({1: "a", 2: "b"})
    names = {1: "a"}
    made = Directory(people.grid, "{}", lambda: roster(names))  # type: ignore[arg-type]
    people.grid.nodes = {1}
    look(made)
    names[2] = "b"
    people.grid.nodes = {1, 2}
    look(made)
    assert sorted(made.members()) == ["a", "b"]


class Messenger:
    """Answers every request at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            self.asked.append(request.clients)
            yield Reply(request.clients, "done")


def federation(
    people: People, registered: dict[int, str] | None = None, **settings: Any
) -> tuple[SiteFederation, Messenger]:
    messenger = Messenger()
    directory = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    given = {"wait_for_clients_s": 0.5, "grace_s": 0.0, **settings}
    waits = FederationSettings(**given)
    made = SiteFederation(directory, messenger, waits)  # type: ignore[arg-type]
    return made, messenger


def test_every_client_is_asked_alone_and_who_is_away_fails() -> None:
    made, messenger = federation(People({1: "a", 2: "b"}))
    made.gather()
    requests = [Request(("a", "x", "b"), None), Request(("y",), None)]
    replies = list(made.exchange(Step(Purpose.VALIDATE, 1, [0]), requests))
    assert messenger.asked == [("a",), ("b",)]
    assert [(one.clients, one.failure) for one in replies] == [
        (("a",), None),
        (("b",), None),
        (("x",), "it is not connected"),
        (("y",), "it is not connected"),
    ]


def test_it_begins_as_soon_as_enough_are_there() -> None:
    made, _ = federation(People({1: "a", 2: "b"}), min_clients=2)
    assert sorted(member.name for member in made.gather()) == ["a", "b"]


def test_it_waits_for_all_that_are_registered() -> None:
    people = People({1: "a", 2: "b"})
    people.grid.nodes = {1}
    registered = {1: "a", 2: "b"}
    made, _ = federation(people, registered, wait_for_clients_s=60.0)
    timer = threading.Timer(0.3, people.grid.nodes.add, [2])
    timer.start()
    assert sorted(member.name for member in made.gather()) == ["a", "b"]


def test_with_some_of_the_registered_it_begins_after_a_while() -> None:
    people = People({1: "a", 2: "b"})
    people.grid.nodes = {1}
    made, _ = federation(people, {1: "a", 2: "b"})
    assert [member.name for member in made.gather()] == ["a"]


@pytest.mark.parametrize(("least", "said"), [(None, "at least 1"), (3, "at least 3")])
def test_waiting_for_clients_ends(least: int | None, said: str) -> None:
    people = People({1: "a"})
    if least is None:
        people.change(1, problem="no data")
    made, _ = federation(people, min_clients=least)
    with pytest.raises(RunError, match=f"expected {said} clients") as caught:
        made.gather()
    assert ("no data" in str(caught.value)) == (least is None)


def test_before_a_round_it_waits_for_those_who_are_needed() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    made, _ = federation(people)
    made.await_clients(["a", "b", "x"], 2)
    with pytest.raises(RunError, match=r"for 3 of 3 clients, found 2 \(a, b\)"):
        made.await_clients(["a", "b", "x"], 3)


def test_it_stops_waiting_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "LOOK_EVERY_S", 60.0)
    made, _ = federation(People({}), wait_for_clients_s=600.0)
    threading.Timer(0.1, made.stop.set).start()
    with pytest.raises(RunError, match="stopped while waiting"):
        made.gather()


def test_who_has_just_been_lost_is_waited_for() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    made, _ = federation(people, grace_s=20.0, wait_for_clients_s=60.0)
    made.await_clients(["a", "b", "c"], 2)
    people.grid.nodes.discard(3)
    threading.Timer(0.5, people.grid.nodes.add, [3]).start()
    made.await_clients(["a", "b", "c"], 2)
    assert "c" in made.directory.members()


def test_who_has_been_lost_for_long_is_not_waited_for_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    made, _ = federation(people, grace_s=0.5, wait_for_clients_s=60.0)
    made.await_clients(["a", "b", "c"], 2)
    people.grid.nodes.discard(3)
    made.await_clients(["a", "b", "c"], 2)
    monkeypatch.setattr(made.stop, "wait", lambda _: pytest.fail("it waits again"))
    made.await_clients(["a", "b", "c"], 2)


def test_who_is_there_and_busy_is_waited_for() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    answer, is_busy = people.grid.answer, threading.Event()
    people.grid.answer = lambda one: (
        None if one.metadata.dst_node_id == 3 and is_busy.is_set() else answer(one)
    )
    is_busy.set()
    registered = {1: "a", 2: "b", 3: "c"}
    made, _ = federation(people, registered, wait_for_clients_s=60.0)
    threading.Timer(0.5, is_busy.clear).start()
    made.await_clients(["a", "b", "c"], 2)
    assert "c" in made.directory.members()
