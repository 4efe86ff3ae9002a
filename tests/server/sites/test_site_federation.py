import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.experiment import FederationSettings
from knnper.server import sites as federation_module
from knnper.server.federation import Reply, Request
from knnper.server.sites import Directory, SiteFederation
from knnper.transport.messages import Purpose
from tests.server.sites.people import People, roster

pytestmark = pytest.mark.usefixtures("inside_a_run")


class Messenger:
    """Answers every request at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep: int,
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        for request in requests:
            self.asked.append(request.clients)
            yield Reply(request.clients, "done")


def federation(
    people: People, registered: dict[int, str] | None = None, **settings: Any
) -> tuple[SiteFederation, Messenger]:
    messenger = Messenger()
    directory = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    given = {"wait_for_clients_s": 1.0, "grace_s": 0.0, **settings}
    waits = FederationSettings(**given)
    made = SiteFederation(directory, messenger, waits)  # type: ignore[arg-type]
    return made, messenger


def test_every_client_is_asked_alone_and_who_is_away_fails() -> None:
    made, messenger = federation(People({1: "a", 2: "b"}))
    made.gather()
    requests = [Request(("a", "x", "b"), None), Request(("y",), None)]
    replies = list(made.exchange(Purpose.VALIDATE, 1, [0], requests))
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
    monkeypatch.setattr(federation_module, "LOOK_EVERY_S", 60.0)
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
