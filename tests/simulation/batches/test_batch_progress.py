"""The time that is left, against workers whose every second is known beforehand."""

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from knnper.simulation.batches.family import Event, Family, Step
from knnper.simulation.batches.progress import TimeLeft, Told, Tracker

ROUNDS = 10


@dataclass(frozen=True)
class Work:
    """A family, and how long it keeps a worker busy: known to the test alone."""

    family: Family
    round_s: float
    personalization_s: float

    @property
    def seconds(self) -> float:
        """In all."""
        return ROUNDS * self.round_s + len(self.family.runs) * self.personalization_s


def work(
    folder: Path,
    name: str,
    round_s: float,
    personalization_s: float = 1.0,
    num_runs: int = 1,
    **settings: Any,
) -> Work:
    def document(place: int) -> str:
        personalization, run = {"k": place}, {"seed": name}
        return json.dumps(
            {"training": settings, "personalization": personalization, "run": run}
        )

    runs = {folder / name / str(place): document(place) for place in range(num_runs)}
    return Work(Family(runs, ROUNDS, ()), round_s, personalization_s)


def steps_of(number: int, one: Work, start: float) -> Iterator[tuple[float, Told]]:
    """Yield what a worker tells that makes a family from a moment on."""
    now = start
    for place in range(len(one.family.runs)):
        yield now, (number, Event(Step.BEGAN, now, place))
        first = 1 if place == 0 else ROUNDS + 1
        yield now, (number, Event(Step.TRAINS, now, ROUNDS, first))
        for _ in range(first, ROUNDS + 1):
            now += one.round_s
            yield now, (number, Event(Step.ROUND, now))
        now += one.personalization_s
        yield now, (number, Event(Step.ENDED, now))


def left_of(tracker: Tracker) -> TimeLeft:
    left = tracker.left()
    assert left is not None
    return left


def timeline(works: Sequence[Work], num_workers: int) -> tuple[list[Any], float]:
    """Return all that is told with its moments, and when all is done."""
    free, told = [0.0] * num_workers, list[tuple[float, Told]]()
    for number, one in enumerate(works):
        start = heapq.heappop(free)
        told += steps_of(number, one, start)
        heapq.heappush(free, start + one.seconds)
    return sorted(told, key=lambda one: one[0]), max(free)


def errors(
    works: Sequence[Work], num_workers: int, parts: Sequence[float]
) -> list[float]:
    """Return by how much of what is left the phrase is wrong at parts of the way."""
    told, end = timeline(works, num_workers)
    now = [0.0]
    tracker = Tracker(num_workers, lambda: now[0])
    assert tracker.expect([one.family for one in works]) == [
        one.family for one in works
    ]
    found = []
    for part in parts:
        now[0] = part * end
        tracker.note(one for moment, one in told if moment <= now[0])
        told = [one for one in told if one[0] > now[0]]
        left = left_of(tracker)
        found.append((left.seconds - (end - now[0])) / (end - now[0]))
    tracker.note(one for _, one in told)
    now[0] = end
    last = left_of(tracker)
    assert (last.seconds, last.is_least) == (0.0, False)
    assert tracker.num_made == tracker.num_steps
    return found


PARTS = (0.25, 0.5, 0.75, 0.95)


@pytest.mark.parametrize(
    ("num_families", "seconds", "num_runs", "within"),
    [
        (6, (2.0, 5.0), 3, 0.02),
        (5, (2.0, 5.0), 3, 0.02),  # in the end one of two workers works alone
        (1, (1.0, 10.0), 9, 0.05),  # one training, then nine long personalisations
    ],
)
def test_the_rest_is_foretold(
    tmp_path: Path,
    num_families: int,
    seconds: tuple[float, float],
    num_runs: int,
    within: float,
) -> None:
    works = [
        work(tmp_path, str(seed), *seconds, num_runs=num_runs)
        for seed in range(num_families)
    ]
    assert errors(works, 2, PARTS) == pytest.approx([0, 0, 0, 0], abs=within)


def test_slow_runs_behind_fast_ones_are_waited_for(tmp_path: Path) -> None:
    """Those with more local epochs take four times as long, and come last."""
    works = [
        work(tmp_path, f"{seed}-{epochs}", 1.0 * epochs, 2.0, local_epochs=epochs)
        for epochs in (1, 4)
        for seed in range(4)
    ]
    # At a quarter none of the slow ones is timed: nobody can know. Later all is.
    _, *known = errors(works, 2, (0.1, 0.5, 0.75, 0.95))
    assert known == pytest.approx([0, 0, 0], abs=0.05)


def test_what_nobody_timed_is_not_foretold(tmp_path: Path) -> None:
    works = [work(tmp_path, "one", 2.0, 30.0)]
    told, _ = timeline(works, 1)
    now = [0.0]
    tracker = Tracker(1, lambda: now[0])
    tracker.expect([works[0].family])
    assert tracker.left() is None
    now[0] = 10.0
    tracker.note(one for moment, one in told if moment <= now[0])
    left = left_of(tracker)
    # Five rounds of two seconds; how long the personalisation takes is not known yet.
    assert (left.seconds, left.is_least) == (10.0, True)


def test_between_two_rounds_time_goes_on(tmp_path: Path) -> None:
    works = [work(tmp_path, "one", 10.0)]
    told, _ = timeline(works, 1)
    now = [30.0]
    tracker = Tracker(1, lambda: now[0])
    tracker.expect([works[0].family])
    tracker.note(one for moment, one in told if moment <= 30.0)
    found = []
    for moment in (30.0, 34.0, 39.0, 70.0):
        now[0] = moment
        left = left_of(tracker)
        found.append(left.seconds)
    # A round that takes too long is no reason to believe that the others are shorter.
    assert found == [70.0, 66.0, 61.0, 60.0]


def test_a_later_stage_is_waited_for(tmp_path: Path) -> None:
    now = [0.0]
    tracker = Tracker(1, lambda: now[0])
    first = work(tmp_path, "tuned", 1.0, 2.0)
    later = [work(tmp_path, f"tested {seed}", 1.0, 2.0).family for seed in range(3)]
    tracker.expect([first.family], later)
    told, end = timeline([first], 1)
    tracker.note(one for _, one in told)
    now[0] = end
    left = left_of(tracker)
    assert left.seconds == pytest.approx(3 * first.seconds)
    tracker.expect(later)
    again = left_of(tracker)
    assert again.seconds == pytest.approx(left.seconds)


def test_what_trains_anew_and_what_diverges_changes_the_steps(tmp_path: Path) -> None:
    one = work(tmp_path, "one", 1.0, num_runs=3)
    tracker = Tracker(1, lambda: 0.0)
    tracker.expect([one.family])
    assert tracker.num_steps == ROUNDS + 3

    def tell(*events: Event) -> None:
        tracker.note((0, event) for event in events)

    def run(place: int, first: int, num_made: int) -> None:
        tell(Event(Step.BEGAN, 0.0, place), Event(Step.TRAINS, 0.0, ROUNDS, first))
        tell(*(Event(Step.ROUND, 0.0) for _ in range(num_made)))
        tell(Event(Step.ENDED, 0.0))

    run(0, 1, ROUNDS)
    assert tracker.num_made == ROUNDS + 1
    run(1, 1, 4)  # has a state of its own, and diverges in the fifth round
    assert tracker.num_steps == ROUNDS + 4 + 3
    run(2, ROUNDS + 1, 0)
    assert tracker.num_made == tracker.num_steps
    left = left_of(tracker)
    assert left.seconds == 0.0


def test_what_was_made_before_tells_how_long_it_takes(tmp_path: Path) -> None:
    works = [work(tmp_path, name, 1.0, 2.0) for name in ("made", "missing")]
    made = next(iter(works[0].family.runs))
    made.mkdir(parents=True)
    training = {"num_rounds": ROUNDS, "seconds": 20.0, "personalization_seconds": 7.0}
    (made / "results.json").write_text(json.dumps({"training": training}))
    tracker = Tracker(1, lambda: 0.0)
    assert tracker.expect([one.family for one in works]) == [works[1].family]
    left = left_of(tracker)
    assert (left.seconds, left.is_least) == (27.0, False)
    assert tracker.num_made == ROUNDS + 1
