"""Steps of real clients' answers as they come in, with the real server and clients."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Error, Message

from knnper.errors import RunError
from knnper.simulation.reports.client_table import read_clients
from knnper.transport.messages import Purpose
from tests.apps.site_grid import SiteGrid, experiment, simulated
from tests.apps.test_site_run import SEEN, lead, three, weights_of

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]
SLOW, FAILING = 12, 10
BUFFERED = {"training.timing": "{name: buffered, buffer_size: 1}"}


class SlowGrid(SiteGrid):
    """One node's updates come after so many looks."""

    looks = 12

    def __init__(self, files: dict[int, Path]) -> None:
        super().__init__(files)
        self.looked: Counter[str] = Counter()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = list(message_ids)
        self.looked.update(wanted)
        return super().pull_messages(
            one for one in wanted if self.looked[one] > self.looks * self._is_slow(one)
        )

    def _is_slow(self, name: str) -> bool:
        to = self.messages[name].metadata
        return to.dst_node_id == SLOW and to.message_type == Purpose.TRAIN.value


def slow(files: dict[str, Path]) -> SlowGrid:
    return SlowGrid({10 + place: files[name] for place, name in enumerate(SEEN)})


def test_nobody_waits_for_the_slow_one(tmp_path: Path, files: dict[str, Path]) -> None:
    settings = experiment(**BUFFERED, **{"training.num_rounds": "30"})
    ran = lead(slow(files), settings, tmp_path / "run")
    rounds = ran.rounds()
    assert len(rounds) == 30
    assert all(one["num_clients"] == 1 for one in rounds)
    assert "virtual_seconds" not in rounds[0]
    late = [one for one in rounds if SEEN[2] in one["participants"]]
    assert late
    assert late[0]["staleness_max"] >= 5
    clients = read_clients(ran.path).set_index("client")
    assert clients.loc[SEEN[2], "num_rounds"] == len(late)
    assert clients.loc[SEEN[2], "staleness"] >= 5
    assert clients["num_rounds"].sum() == 30


def test_where_all_are_waited_for_steps_are_rounds(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    """A step of the answers of all clients is FedAvg's, to the bit."""
    timing = {"training.timing": "{name: buffered, buffer_size: 3}"}
    ran = lead(three(files), experiment(**timing), tmp_path / "run")
    assert weights_of(ran) == weights_of(simulated(tmp_path / "plain", experiment()))


def test_who_is_late_does_not_count(tmp_path: Path, files: dict[str, Path]) -> None:
    timing = {
        "training.timing": "{name: synchronous, over_selection: 1.5}",
        "training.participation": "0.67",
        "training.num_rounds": "4",
    }
    ran = lead(slow(files), experiment(**timing), tmp_path / "run")
    assert ran.rounds()[0]["num_late"] == 1
    assert all(SEEN[2] not in one["participants"] for one in ran.rounds()[:2])


def test_who_answers_at_once_and_is_late_does_not_count_later(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    timing = {
        "training.timing": "{name: synchronous, over_selection: 1.5}",
        "training.participation": "0.67",
        "training.num_rounds": "3",
    }
    ran = lead(three(files), experiment(**timing), tmp_path / "run")
    assert [one["num_late"] for one in ran.rounds()] == [1, 1, 1]
    taking_part = [sorted(one["participants"]) for one in ran.rounds()]
    assert taking_part == [list(SEEN[:2])] * 3


class FailingGrid(SiteGrid):
    """One node fails at all that it is asked to train."""

    def answer(self, message: Message) -> Message:
        to = message.metadata
        if to.dst_node_id == FAILING and to.message_type == Purpose.TRAIN.value:
            return Message(Error(code=2, reason="out of memory"), reply_to=message)
        return super().answer(message)


@pytest.mark.parametrize(
    "timing",
    ["{name: buffered, buffer_size: 1}", "{name: synchronous, over_selection: 1.5}"],
)
def test_who_fails_takes_nobodys_place(
    tmp_path: Path, files: dict[str, Path], timing: str
) -> None:
    settings = {
        "training.timing": timing,
        "training.participation": "1.0" if "buffered" in timing else "0.67",
        "training.num_rounds": "6",
    }
    needed = 1 if "buffered" in timing else 2
    grid = FailingGrid({10 + place: files[name] for place, name in enumerate(SEEN)})
    ran = lead(grid, experiment(**settings), tmp_path / "run")
    rounds = ran.rounds()
    assert [one["num_clients"] for one in rounds] == [needed] * 6
    assert all(SEEN[0] not in one["participants"] for one in rounds)
    assert sum(one["num_failed"] for one in rounds) > 0
    failures = [one["failures"] for one in rounds if one["num_failed"]]
    assert all(found == {SEEN[0]: "out of memory"} for found in failures)


def test_where_all_fail_the_run_ends_and_says_why(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    timing = {**BUFFERED, "run.federation.round_attempts": "1"}
    grid = FailingGrid({FAILING: files[SEEN[0]]})
    with pytest.raises(RunError, match=r"round 1: 1 of 1 clients .*out of memory"):
        lead(grid, experiment(**timing), tmp_path / "run")


def test_state_at_clients_needs_a_schedule_known_before(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    settings = experiment(**BUFFERED, **{"method": "{name: ditto}"})
    with pytest.raises(RunError, match=r"training\.timing: found buffered"):
        lead(three(files), settings, tmp_path / "run")
