import pytest

from knnper.server import sites as directory_module
from knnper.server import sites as introductions
from knnper.server.sites import Directory
from tests.server.sites.people import People, roster

pytestmark = pytest.mark.usefixtures("inside_a_run")


def directory(people: People, registered: dict[int, str] | None = None) -> Directory:
    made = Directory(people.grid, "{}", lambda: roster(registered or {}))  # type: ignore[arg-type]
    look(made)
    return made


def look(made: Directory) -> None:
    """Ask who is new, and hear what they say: the grid answers at the second look."""
    for _ in range(3):
        made.refresh()


def test_clients_are_known_by_the_names_they_say() -> None:
    people = People({1: "b", 2: "a"})
    found = directory(people)
    assert sorted(found.members()) == ["a", "b"]
    assert found.members()["b"].num_train == 10
    assert (found.node_of("a"), found.node_of("c")) == (2, None)


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


def test_a_client_that_comes_back_as_another_node_is_the_same_client() -> None:
    people = People({1: "a"})
    found = directory(people)
    people.said[7], people.grid.nodes = people.said[1], {7}
    look(found)
    assert found.node_of("a") == 7


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
    monkeypatch.setattr(directory_module, "ASK_AGAIN_S", 0.0)
    again = directory(people)
    assert list(again.members()) == ["a"]


def test_who_still_cannot_take_part_is_told_again_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory_module, "ASK_AGAIN_S", 0.0)
    people = People({1: "a"})
    people.change(1, problem="unknown label 'cta'")
    found = directory(people)
    look(found)
    assert len(people.notices()) == 1
    monkeypatch.setattr(directory_module, "REMIND_S", -1.0)
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
    monkeypatch.setattr(introductions, "TIMEOUT_S", 0.0)
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
