"""The steps of a batch that are done, and the time that is left."""

import json
from pathlib import Path

from knnper.simulation.batches.family import (
    Event,
    Family,
    RunStage,
)
from knnper.simulation.batches.progress import (
    Progress,
    Tracker,
)

ROUNDS = 10


def family(folder: Path, name: str, num_runs: int = 1) -> Family:
    runs = {folder / name / str(place): "{}" for place in range(num_runs)}
    return Family(runs, ROUNDS, ())


def test_steps_are_rounds_and_personalisations(tmp_path: Path) -> None:
    tracker = Tracker(lambda: 0.0)
    three_runs = family(tmp_path, "one", num_runs=3)
    assert tracker.expect([three_runs]) == [three_runs]
    assert tracker.num_steps == ROUNDS + 3

    def run(first_round: int, num_made: int) -> None:
        events = [
            Event(RunStage.TRAINS, ROUNDS, first_round),
            *[Event(RunStage.ROUND)] * num_made,
            Event(RunStage.ENDED),
        ]
        tracker.handle((0, event) for event in events)

    run(1, ROUNDS)
    assert tracker.num_done == ROUNDS + 1
    run(1, 4)  # has a state of its own, and diverges in the fifth round
    assert tracker.num_steps == ROUNDS + 4 + 3
    run(ROUNDS + 1, 0)
    assert tracker.num_done == tracker.num_steps


def test_time_left_follows_the_mean_step(tmp_path: Path) -> None:
    now = [100.0]
    tracker = Tracker(lambda: now[0])
    tracker.expect([family(tmp_path, "one")], [family(tmp_path, "later")])
    assert tracker.progress() == Progress(0, 2 * (ROUNDS + 1), 0, None)
    events = [Event(RunStage.TRAINS, ROUNDS, 1), *[Event(RunStage.ROUND)] * 4]
    tracker.handle((0, event) for event in events)
    now[0] = 108.0
    # 4 of 22 steps in 8 s: 18 steps of 2 s are left.
    assert tracker.progress() == Progress(4, 22, 0, 36.0)


def test_done_runs_are_steps_at_the_start(tmp_path: Path) -> None:
    now = [0.0]
    tracker = Tracker(lambda: now[0])
    done, missing = family(tmp_path, "done"), family(tmp_path, "missing")
    folder = next(iter(done.runs))
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"training": {}}))
    assert tracker.expect([done, missing]) == [missing]
    now[0] = 9.0
    at_start = ROUNDS + 1
    assert tracker.progress() == Progress(at_start, 2 * (ROUNDS + 1), at_start, None)


def test_repeated_rounds_count_once(tmp_path: Path) -> None:
    tracker = Tracker(lambda: 0.0)
    tracker.expect([family(tmp_path, "one")])
    events = [Event(RunStage.TRAINS, ROUNDS, 1), *[Event(RunStage.ROUND)] * 6]
    tracker.handle((0, event) for event in events)
    assert tracker.progress().done == 6
    # Another worker resumes from the checkpoint of round 3.
    tracker.handle([(0, Event(RunStage.TRAINS, ROUNDS, 4))])
    assert tracker.num_done == 3
    assert tracker.progress().done == 6
