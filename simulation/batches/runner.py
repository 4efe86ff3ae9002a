"""The runner of sweeps and comparisons: makes missing runs in worker processes.

Every run has a folder named by its settings. After an interruption, or with new points
in its file, a batch makes only the missing runs. A comparison has three stages: runs on
validation data for rows that follow none, the same for rows that follow another, and
tests.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.experiment_file import results_identity, to_json
from knnper.metrics import gain
from knnper.server.results import figure_of
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.earlier_training import with_earlier_training
from knnper.simulation.batches.family import (
    Family,
    is_done,
    read_json,
    training_identity,
    why_failed,
)
from knnper.simulation.batches.folder import RUNS, BatchIdentity, batch_folder
from knnper.simulation.batches.points import Point, tested, tuning_of
from knnper.simulation.batches.progress import Advance, Tracker
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.batches.workers import run_in_workers
from knnper.simulation.origin import INPUTS, inputs_of, require_inputs, split_of

Plan = Comparison | Sweep


@dataclass(frozen=True)
class Candidate:
    """A point and its result on validation data.

    Attributes
    ----------
    score
        The weighted metric of the seen clients; None if the run failed.
    """

    point: Point
    score: float | None
    failure: str | None


@dataclass(frozen=True)
class Outcome:
    """A point that was run with every seed.

    Attributes
    ----------
    runs
        The folders of the runs with results, by seed.
    failures
        The reasons of failures, by seed.
    candidates
        The points that this one was chosen from, in the order of the grid.
    """

    point: Point
    runs: Mapping[int, Path]
    failures: Mapping[int, str] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()


def run_batch(
    plan: Plan,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = ("knnper",),
    earlier: Sequence[Path] = (),
) -> list[Outcome]:
    """Make the missing runs of a batch; return its tested points.

    Parameters
    ----------
    folder
        The batch's folder.
    advance
        Called with the progress, about once a second.
    command
        The command for the runs' manifests.
    earlier
        Finished runs with trainings to reuse.

    Raises
    ------
    FolderTakenError, RunError
        If the folder or an earlier run cannot be used, before anything is written; or
        if no point can be chosen, or a reference row fails.
    """
    tracker = Tracker()

    def families(experiments: Iterable[Experiment]) -> list[Family]:
        return families_of(
            experiments, folder, command, keeps_training=isinstance(plan, Sweep)
        )

    def make(all_families: Sequence[Family], later: Sequence[Family] = ()) -> None:
        _require_same_inputs(all_families)
        missing = tracker.expect(all_families, later)
        advance(tracker.progress())
        for events in run_in_workers(missing, num_workers):
            tracker.handle(events)
            advance(tracker.progress())

    first_tuning, second_tuning, guessed_tests = _stages(plan)
    is_tuned = bool(first_tuning or second_tuning)
    # Earlier runs that do not fit are rejected before anything is written.
    test_families = (
        None if is_tuned else with_earlier_training(families(guessed_tests), earlier)
    )
    with batch_folder(folder, BatchIdentity(plan.kind, plan.name)):
        best: dict[str, Point] = {}
        candidates: dict[str, list[Candidate]] = {}
        for following, later in (
            (False, [*second_tuning, *guessed_tests]),
            (True, guessed_tests),
        ):
            choices = plan.to_choose_from(best, following=following)
            several = {name: points for name, points in choices.items() if points[1:]}
            if several:
                # The chosen points are not known yet; guessed points take as long.
                tuning = tuning_of(itertools.chain(*several.values()))
                make(families(tuning), families(later))
            for name, points in choices.items():
                best[name] = points[0]
                if name in several:
                    candidates[name] = _read_scores(points, folder, plan.metric)
                    best[name] = _choose(name, candidates[name], folder, plan.metric)
        chosen = plan.tested_with(best)
        if test_families is None:
            test_families = with_earlier_training(families(tested(chosen)), earlier)
        make(test_families)
    return [
        _outcome_of(plan, point, folder, candidates.get(point.variant, ()))
        for point in chosen
    ]


def num_steps(plan: Plan) -> int:
    """Return how many rounds and personalisations a batch takes."""
    families = families_of(itertools.chain(*_stages(plan)), Path(), ())
    return sum(family.num_rounds + len(family.runs) for family in families)


def num_runs(plan: Plan, folder: Path) -> tuple[int, int]:
    """Return how many runs a batch takes, and how many of all are done."""
    folders = {folder_of(experiment, folder) for experiment in plan.experiments}
    expected = {
        folder_of(experiment, folder) for experiment in itertools.chain(*_stages(plan))
    }
    return len(expected), sum(map(is_done, folders))


def _stages(plan: Plan) -> tuple[list[Experiment], list[Experiment], list[Experiment]]:
    """Return the experiments of the stages, as if every first candidate were chosen."""
    tuning = list[list[Experiment]]()
    best = dict[str, Point]()
    for following in (False, True):
        choices = plan.to_choose_from(best, following=following)
        several = (points for points in choices.values() if points[1:])
        tuning.append(tuning_of(itertools.chain(*several)))
        best |= {name: points[0] for name, points in choices.items()}
    first, second = tuning
    return first, second, tested(plan.tested_with(best))


def _read_scores(points: Iterable[Point], folder: Path, metric: str) -> list[Candidate]:
    """Return the candidates with their scores on validation data."""
    candidates = []
    for point in points:
        if point.tuning is None:
            raise ValueError(f"{point.variant} has no experiment on validation data")
        path = folder_of(point.tuning, folder)
        failure = why_failed(path)
        score = None
        if failure is None:
            score = RunFolder(path).results()["seen"][figure_of(metric, "weighted")]
        candidates.append(Candidate(point, score, failure))
    return candidates


def _choose(
    name: str, candidates: Sequence[Candidate], folder: Path, metric: str
) -> Point:
    """Return the candidate with the best score, of equal scores the first."""
    scored = [candidate for candidate in candidates if candidate.score is not None]
    if not scored:
        failures = (candidate.failure for candidate in candidates if candidate.failure)
        raise RunError(
            f"no candidate of the row {name} has a score on validation data; the "
            f"first reason: {next(failures, 'no score')}. Change its grid, with "
            "smaller learning rates where training diverged; to repeat a run, delete "
            f"its folder in {folder / RUNS}"
        )
    best = max(scored, key=lambda scored: gain(metric, scored.score or 0.0, over=0.0))
    return best.point


def _outcome_of(
    plan: Plan, point: Point, folder: Path, candidates: Sequence[Candidate]
) -> Outcome:
    """Return runs and failures of a point; raise RunError for a failed reference."""
    paths = {seed: folder_of(run, folder) for seed, run in point.runs.items()}
    failures = {
        seed: reason
        for seed, path in paths.items()
        if (reason := why_failed(path)) is not None
    }
    if isinstance(plan, Comparison) and point.variant == plan.reference:
        for seed, reason in failures.items():  # the first failure is enough
            row = f"the reference row {point.variant}"
            raise RunError(
                f"{failure_remark(row, seed, reason, paths[seed])}. Without it no row "
                "can be compared; change its grid or choose another reference"
            )
    runs = {seed: path for seed, path in paths.items() if seed not in failures}
    return Outcome(point, runs, failures, candidates)


def failure_remark(point: str, seed: int, reason: str, run: Path) -> str:
    """Return a remark on a failed run, with how to repeat it."""
    return f"{point} failed with seed {seed}: {reason}. To make it again, delete {run}"


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return the folder of a run in that of its batch; equal results share one."""
    return folder / RUNS / results_identity(experiment)[:16]


def families_of(
    experiments: Iterable[Experiment],
    folder: Path,
    command: Sequence[str],
    *,
    keeps_training: bool = False,
) -> list[Family]:
    """Group experiments into families by their training; equal runs are merged."""
    by_training: dict[str, dict[Path, Experiment]] = {}
    for experiment in experiments:
        runs = by_training.setdefault(training_identity(experiment), {})
        runs.setdefault(folder_of(experiment, folder), experiment)
    return [
        Family(
            runs={path: to_json(experiment) for path, experiment in runs.items()},
            num_rounds=next(iter(runs.values())).training.num_rounds,
            command=tuple(command),
            keeps_training=keeps_training,
        )
        for runs in by_training.values()
    ]


def _require_same_inputs(families: Iterable[Family]) -> None:
    """Reject the folder if data, weights or split of a run in it have changed."""
    known: dict[tuple[object, str], Any] = {}

    def once(compute: Callable[[Experiment], Any], text: str, *sections: str) -> Any:
        """Compute what depends on some sections once for equal sections."""
        document = json.loads(text)
        key = (compute, json.dumps([document[section] for section in sections]))
        if key not in known:
            known[key] = compute(read_json(text))
        return known[key]

    for family in families:
        for folder, text in family.runs.items():
            if (folder / INPUTS).is_file():
                inputs = once(inputs_of, text, "data", "model")
                # Before the split, since data of another size may not be splittable.
                require_inputs(folder, inputs)
                split = once(split_of, text, "data", "partition", "run")
                require_inputs(folder, replace(inputs, split=split))
