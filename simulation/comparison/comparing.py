"""A comparison from its plan to its tuned and tested rows.

Every run has a folder named by what it is. A comparison that was interrupted, or whose
file grew, makes only what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from server.run_folder import RunFolder
from simulation.batch.families import (
    by_seed,
    failure_remark,
    families_of,
    folder_of,
    require_same_inputs,
)
from simulation.batch.folder import Identity, batch_folder
from simulation.batch.playing import is_done, why_failed
from simulation.batch.progress import Advance, Progress, Tracker
from simulation.batch.workers import play_side_by_side
from simulation.comparison.plan import Candidate, Comparison, Row

COMMAND = ("knnper", "compare")


@dataclass(frozen=True)
class Scored:
    """A candidate and how it did on validation data.

    Attributes
    ----------
    candidate
        What was tried.
    score
        Accuracy of the personalised models of the seen clients, weighted by their
        validation data; None where the run failed, or was not needed.
    failure
        Why it failed.
    """

    candidate: Candidate
    score: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A row that was tuned and tested.

    Attributes
    ----------
    row
        What it is.
    tried
        All candidates, in the order of the grid; one alone is not scored.
    chosen
        The best; of equal ones the first.
    runs
        The folders of the tested runs by seed.
    failures
        Why, by seed, of those that failed.
    """

    row: Row
    tried: Sequence[Scored]
    chosen: Candidate
    runs: Mapping[int, Path]
    failures: Mapping[int, str] = field(default_factory=dict)


def num_runs(comparison: Comparison) -> int:
    """Return how many runs a comparison takes."""
    tuned = sum(len(row.candidates) for row in comparison.rows if _is_tuned(row))
    return tuned + len(comparison.rows) * len(comparison.seeds)


def compare(
    comparison: Comparison,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = COMMAND,
) -> list[Outcome]:
    """Make all runs that are missing in ``folder``; return how each row was chosen.

    Parameters
    ----------
    comparison
        What to run.
    folder
        Holds a folder for each run.
    num_workers
        Processes side by side; what they compute does not depend on it.
    advance
        Told how far the comparison is, in runs.
    command
        What was typed, for the runs' manifests.

    Raises
    ------
    FolderTakenError
        If the folder is a file, or holds another batch or something else.
    RunError
        If another process is at work in it, runs in it were made from other data, all
        candidates of a row fail, or the reference row fails when it is tested.
    """
    tracker, total = Tracker(num_workers), num_runs(comparison)
    before = found = 0

    def make(experiments: Sequence[Experiment], later: Sequence[Experiment]) -> None:
        nonlocal before, found
        families = families_of(experiments, folder, command)
        require_same_inputs(families)
        missing = tracker.expect(families, families_of(later, folder, command))
        # Rows can have a run in common, which then counts for each.
        folders = [folder_of(one, folder) for one in experiments]
        done = sum(map(is_done, folders))
        found += done
        advance(Progress(before + done, total, found, tracker.left()))
        for told in play_side_by_side(missing, num_workers):
            tracker.note(told)
            done = sum(map(is_done, folders))
            advance(Progress(before + done, total, found, tracker.left()))
        before += len(folders)

    with batch_folder(folder, Identity("comparison", comparison.name)):
        return _compare(comparison, folder, make)


def _compare(
    comparison: Comparison,
    folder: Path,
    make: Callable[[Sequence[Experiment], Sequence[Experiment]], None],
) -> list[Outcome]:
    tuned = [row for row in comparison.rows if _is_tuned(row)]
    tuning = [one.tuning for row in tuned for one in row.candidates]
    # Nobody knows yet which candidates are chosen; they take about as long.
    later = [
        row.candidates[0].tested(seed)
        for row in comparison.rows
        for seed in comparison.seeds
    ]
    make(tuning, later)
    chosen = {row.name: _choose(row, folder) for row in comparison.rows}
    tested = [
        candidate.tested(seed)
        for _, candidate in chosen.values()
        for seed in comparison.seeds
    ]
    make(tested, ())
    return [
        _outcome(row, *chosen[row.name], comparison, folder) for row in comparison.rows
    ]


def _is_tuned(row: Row) -> bool:
    return len(row.candidates) > 1


def _choose(row: Row, folder: Path) -> tuple[Sequence[Scored], Candidate]:
    if not _is_tuned(row):
        (only,) = row.candidates
        return [Scored(only)], only
    tried = [_scored(candidate, folder) for candidate in row.candidates]
    scored = [one for one in tried if one.score is not None]
    if not scored:
        reason = next((one.failure for one in tried if one.failure), "no score")
        raise RunError(
            f"no candidate of the row {row.name} has a score on validation data; the "
            f"first reason: {reason}. Change its grid, with smaller learning rates "
            "where training diverged; a run is made again when its folder in "
            f"{folder / 'runs'} is deleted"
        )
    # The first of equal ones: max keeps it.
    return tried, max(scored, key=lambda one: one.score or 0.0).candidate


def _scored(candidate: Candidate, folder: Path) -> Scored:
    path = folder_of(candidate.tuning, folder)
    failure = why_failed(path)
    if failure is not None:
        return Scored(candidate, failure=failure)
    seen = RunFolder(path).results()["seen"]
    return Scored(candidate, seen["accuracy_weighted"])


def _outcome(
    row: Row,
    tried: Sequence[Scored],
    chosen: Candidate,
    comparison: Comparison,
    folder: Path,
) -> Outcome:
    tested = {seed: chosen.tested(seed) for seed in comparison.seeds}
    runs, failures = by_seed(tested, folder)
    if failures and row.name == comparison.reference:
        seed, reason = next(iter(failures.items()))
        what, run = f"the reference row {row.name}", folder_of(tested[seed], folder)
        raise RunError(
            f"{failure_remark(what, seed, reason, run)}. Without it nobody can be "
            "compared; change its grid or choose another reference"
        )
    return Outcome(row, tried, chosen, runs, failures)


def folders_of(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Return the folders of all runs that tuned or tested these rows."""
    tuned = [
        folder_of(one.candidate.tuning, folder)
        for outcome in outcomes
        if len(outcome.tried) > 1
        for one in outcome.tried
    ]
    return [*tuned, *(path for one in outcomes for path in one.runs.values())]
