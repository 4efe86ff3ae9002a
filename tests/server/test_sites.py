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
from knnper.server import directory, sites
from knnper.server.directory import Directory
from knnper.server.federation import Reply, Request, Step
from knnper.server.link.authorized import Registered
from knnper.server.sites import SiteFederation
from knnper.transport.messages import Introduction, Purpose, introduction_content
from tests.server.fake_grid import FakeGrid


def roster(
    names: dict[int, str], fixed: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Registered]:
    """Return who is registered, by node."""
    return {
        str(node): Registered(name, "", fixed.get(name)) for node, name in names.items()
    }


class People:
    """The clients behind nodes; their introductions may be changed."""

    def __init__(self, names: dict[int, str]) -> None:
        self.introductions = {
            node: Introduction(name, num_train=10 * node, num_validation=2, num_test=1)
            for node, name in names.items()
        }
        self.asked_nodes: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.grid = FakeGrid(self.answer, names)

    def change(self, node: int, **fields: object) -> None:
        self.introductions[node] = replace(self.introductions[node], **fields)  # type: ignore[arg-type]

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        assert message.metadata.message_type == Purpose.INTRODUCE.value
        self.asked_nodes.append(node)
        introduction = self.introductions.get(node)
        if introduction is None:
            error = Error(code=2, reason="no such file")
            return Message(error, reply_to=message)
        return Message(introduction_content(introduction), reply_to=message)

    def notices(self) -> list[tuple[int, str]]:
        """Return the nodes that were sent a refusal, and its reason."""
        messages = [
            message
            for message in self.grid.messages.values()
            if message.metadata.message_type == Purpose.REFUSE.value
        ]
        return [
            (message.metadata.dst_node_id, _reason(message.content))
            for message in messages
        ]


def _reason(content: RecordDict) -> str:
    return str(content.config_records["refusal"]["reason"])


pytestmark = pytest.mark.usefixtures("inside_a_run")


def clients_of(people: People, registered: dict[int, str] | None = None) -> Directory:
    clients = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    look(clients)
    return clients


def look(clients: Directory) -> None:
    """Ask who is new, and hear what they say: the grid answers at the second look."""
    for _ in range(3):
        clients.refresh()


def test_reported_example_count_is_a_claim_unless_the_operator_fixed_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    people = People({1: "a", 2: "b", 3: "c", 4: "d"})
    people.change(1, num_train=2**53)
    people.change(3, num_train=0)
    fixed = {"a": 700, "b": 20, "c": 30}
    known = roster({1: "a", 2: "b", 3: "c", 4: "d"}, fixed)
    clients = Directory(people.grid, "{}", lambda: known)  # type: ignore[arg-type]
    look(clients)
    members = clients.members()
    numbers = {
        name: (member.num_train, member.is_claim) for name, member in members.items()
    }
    assert numbers == {
        "a": (700, False),
        "b": (20, False),
        "c": (0, False),  # it has nothing to train on
        "d": (40, True),
    }
    warned = [message for message in caplog.messages if "the operator fixed" in message]
    assert len(warned) == 2


def test_a_client_is_asked_once_and_forgotten_when_it_leaves() -> None:
    people = People({1: "a", 2: "b"})
    clients = clients_of(people)
    people.grid.nodes = {2}
    look(clients)
    assert (list(clients.members()), clients.node_of("a")) == (["b"], None)
    people.grid.nodes = {1, 2}
    look(clients)
    assert clients.node_of("a") == 1
    assert sorted(people.asked_nodes) == [1, 2]
    people.introductions[7], people.grid.nodes = people.introductions[1], {2, 7}
    look(clients)
    assert clients.node_of("a") == 7, "it is the same client behind another node"


def test_duplicate_name_is_refused_and_both_clients_are_notified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    people = People({1: "a", 2: "a"})
    clients = clients_of(people)
    assert clients.node_of("a") == 1
    ((node, reason),) = people.notices()
    assert node == 2
    assert "the name is taken by node 1" in reason
    assert reason in caplog.text


def test_a_key_goes_by_the_name_it_is_registered_under() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    clients = clients_of(people, {1: "a", 2: "a2"})
    assert list(clients.members()) == ["a"]
    notices = dict(people.notices())
    assert "its key is registered as a2, and it calls itself b" in notices[2]
    assert "its key is not registered under any name" in notices[3]


def test_ineligible_site_is_logged_with_its_reason_and_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = People({1: "a"})
    people.change(1, problem="unknown label 'cta'")
    clients = clients_of(people)
    assert clients.members() == {}
    assert "client a (node 1) cannot take part: unknown label 'cta'" in caplog.text
    assert list(clients.refused())
    people.change(1, problem="")
    look(clients)
    assert clients.members() == {}, "not at once: reading data takes time"
    monkeypatch.setattr(directory, "ASK_AGAIN_S", 0.0)
    again = clients_of(people)
    assert list(again.members()) == ["a"]


def test_ineligible_site_is_notified_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "ASK_AGAIN_S", 0.0)
    people = People({1: "a"})
    people.change(1, problem="unknown label 'cta'")
    clients = clients_of(people)
    look(clients)
    assert len(people.notices()) == 1
    monkeypatch.setattr(directory, "REMIND_S", -1.0)
    clients = clients_of(people)
    num_notices = len(people.notices())
    look(clients)
    assert len(people.notices()) > num_notices


def test_a_node_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    people = People({1: "a"})
    people.grid.nodes.add(9)
    assert list(clients_of(people).members()) == ["a"]
    assert "node 9 did not introduce itself: no such file" in caplog.text


def test_silent_client_does_not_delay_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    people = People({1: "a", 2: "b"})
    answer = people.grid.answer
    people.grid.answer = lambda message: (
        None if message.metadata.dst_node_id == 2 else answer(message)
    )
    clients = clients_of(people, {1: "a", 2: "b"})
    assert list(clients.members()) == ["a"]
    assert (clients.is_silent("a"), clients.is_silent("b")) == (False, True)
    monkeypatch.setattr(directory, "TIMEOUT_S", 0.0)
    look(clients)
    assert list(clients.refused()) == [
        "node 2 did not introduce itself: no answer within 0 s"
    ]


def test_a_key_may_be_registered_while_the_run_goes_on() -> None:
    people = People({1: "a", 2: "b"})
    names = {1: "a"}
    clients = Directory(people.grid, "{}", lambda: roster(names))  # type: ignore[arg-type]
    people.grid.nodes = {1}
    look(clients)
    names[2] = "b"
    people.grid.nodes = {1, 2}
    look(clients)
    assert sorted(clients.members()) == ["a", "b"]


class Messenger:
    """Answers every request at once."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, ...]] = []
        self.begun: list[Request] = []

    def begin(self, step: Step, request: Request) -> None:
        del step
        self.begun.append(request)

    def answered(self) -> list[Reply]:
        begun, self.begun = self.begun, []
        return [Reply(request.clients, "done") for request in begun]

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            self.requested.append(request.clients)
            yield Reply(request.clients, "done")


def federation(
    people: People, registered: dict[int, str] | None = None, **settings: Any
) -> tuple[SiteFederation, Messenger]:
    messenger = Messenger()
    directory = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    values = {"wait_for_clients_s": 0.5, "grace_s": 0.0, **settings}
    waits = FederationSettings(**values)
    site_federation = SiteFederation(directory, messenger, waits)  # type: ignore[arg-type]
    return site_federation, messenger


def test_each_client_has_a_request_of_its_own_and_offline_clients_fail() -> None:
    site_federation, messenger = federation(People({1: "a", 2: "b"}))
    site_federation.gather()
    requests = [Request(("a", "x", "b"), None), Request(("y",), None)]
    replies = list(site_federation.exchange(Step(Purpose.VALIDATE, 1, [0]), requests))
    assert messenger.requested == [("a",), ("b",)]
    assert [(reply.clients, reply.failure) for reply in replies] == [
        (("a",), None),
        (("b",), None),
        (("x",), "it is not connected"),
        (("y",), "it is not connected"),
    ]


def recording(site_federation: SiteFederation) -> list[dict[str, Any]]:
    """Let a federation record; return the list of the details of its entries."""
    details: list[dict[str, Any]] = []
    site_federation.directory.record = lambda event, **more: details.append(more)
    return details


def test_exchange_records_who_answered_also_if_it_ends_early() -> None:
    site_federation, _ = federation(People({1: "a", 2: "b"}))
    site_federation.gather()
    entries = recording(site_federation)
    step = Step(Purpose.VALIDATE, 7, [0])
    list(site_federation.exchange(step, [Request(("a", "x", "b"), None)]))
    replies = site_federation.exchange(step, [Request(("a", "b"), None)])
    assert next(replies).client == "a"
    del replies
    failed = {"x": "it is not connected"}
    assert [(entry["answered"], entry["failed"]) for entry in entries] == [
        (["a", "b"], failed),
        (["a"], {}),
    ]
    assert {(entry["purpose"], entry["round"]) for entry in entries} == {
        (Purpose.VALIDATE, 7)
    }


def test_gather_returns_once_the_least_number_is_connected() -> None:
    site_federation, _ = federation(People({1: "a", 2: "b"}), min_clients=2)
    assert sorted(member.name for member in site_federation.gather()) == ["a", "b"]


def test_gather_waits_for_all_registered_clients() -> None:
    people = People({1: "a", 2: "b"})
    people.grid.nodes = {1}
    registered = {1: "a", 2: "b"}
    site_federation, _ = federation(people, registered, wait_for_clients_s=60.0)
    timer = threading.Timer(0.3, people.grid.nodes.add, [2])
    timer.start()
    assert sorted(member.name for member in site_federation.gather()) == ["a", "b"]


def test_with_some_of_the_registered_it_begins_after_a_while() -> None:
    people = People({1: "a", 2: "b"})
    people.grid.nodes = {1}
    site_federation, _ = federation(people, {1: "a", 2: "b"})
    assert [member.name for member in site_federation.gather()] == ["a"]


@pytest.mark.parametrize(("least", "reason"), [(None, "at least 1"), (3, "at least 3")])
def test_waiting_for_clients_ends(least: int | None, reason: str) -> None:
    people = People({1: "a"})
    if least is None:
        people.change(1, problem="no data")
    site_federation, _ = federation(people, min_clients=least)
    with pytest.raises(RunError, match=f"expected {reason} clients") as caught:
        site_federation.gather()
    assert ("no data" in str(caught.value)) == (least is None)


def test_round_waits_for_required_clients() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    site_federation, _ = federation(people)
    site_federation.await_clients(["a", "b", "x"], 2)
    with pytest.raises(RunError, match=r"for 3 of 3 clients, found 2 \(a, b\)"):
        site_federation.await_clients(["a", "b", "x"], 3)


def test_waiting_ends_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "LOOK_EVERY_S", 60.0)
    site_federation, _ = federation(People({}), wait_for_clients_s=600.0)
    threading.Timer(0.1, site_federation.stop.set).start()
    with pytest.raises(RunError, match="stopped while waiting"):
        site_federation.gather()


def test_recently_lost_client_is_waited_for() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    site_federation, _ = federation(people, grace_s=20.0, wait_for_clients_s=60.0)
    site_federation.await_clients(["a", "b", "c"], 2)
    people.grid.nodes.discard(3)
    threading.Timer(0.5, people.grid.nodes.add, [3]).start()
    site_federation.await_clients(["a", "b", "c"], 2)
    assert "c" in site_federation.directory.members()


def test_long_lost_client_is_not_waited_for_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    site_federation, _ = federation(people, grace_s=0.5, wait_for_clients_s=60.0)
    site_federation.await_clients(["a", "b", "c"], 2)
    people.grid.nodes.discard(3)
    site_federation.await_clients(["a", "b", "c"], 2)
    monkeypatch.setattr(
        site_federation.stop, "wait", lambda _: pytest.fail("it waits again")
    )
    site_federation.await_clients(["a", "b", "c"], 2)


def test_busy_online_client_is_waited_for() -> None:
    people = People({1: "a", 2: "b", 3: "c"})
    answer, is_busy = people.grid.answer, threading.Event()
    people.grid.answer = lambda message: (
        None
        if message.metadata.dst_node_id == 3 and is_busy.is_set()
        else answer(message)
    )
    is_busy.set()
    registered = {1: "a", 2: "b", 3: "c"}
    site_federation, _ = federation(people, registered, wait_for_clients_s=60.0)
    threading.Timer(0.5, is_busy.clear).start()
    site_federation.await_clients(["a", "b", "c"], 2)
    assert "c" in site_federation.directory.members()
