"""A comparison from its plan to its tuned and tested rows.

Every run has a folder named by what it is. A comparison that was interrupted, or whose
file grew, makes only what is missing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from server.run_folder import RunFolder
from simulation.batch.families import (
    Advance,
    by_seed,
    failure_remark,
    families_of,
    folder_of,
    is_made,
    require_same_inputs,
)
from simulation.batch.folder import Identity, batch_folder
from simulation.batch.playing import Family, is_done, why_failed
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
        Told of the runs that are done.
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

    def make(experiments: Sequence[Experiment]) -> None:
        missing = _missing(families_of(experiments, folder, command))
        unfinished = _Unfinished(folder_of(one, folder) for one in experiments)
        advance(unfinished.newly_done(), False)
        for _ in play_side_by_side(missing, num_workers):
            if newly_done := unfinished.newly_done():
                advance(newly_done, True)

    with batch_folder(folder, Identity("comparison", comparison.name)):
        return _compare(comparison, folder, make)


def _compare(
    comparison: Comparison, folder: Path, make: Callable[[Sequence[Experiment]], None]
) -> list[Outcome]:
    tuned = [row for row in comparison.rows if _is_tuned(row)]
    tuning = [one.tuning for row in tuned for one in row.candidates]
    make(tuning)
    chosen = {row.name: _choose(row, folder) for row in comparison.rows}
    tested = [
        candidate.tested(seed)
        for _, candidate in chosen.values()
        for seed in comparison.seeds
    ]
    make(tested)
    return [
        _outcome(row, *chosen[row.name], comparison, folder) for row in comparison.rows
    ]


class _Unfinished:
    """Counts the runs that are done by looking at their folders.

    Rows can have a run in common, which then counts for each.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)

    def newly_done(self) -> int:
        """Return how many more there are than the last time."""
        before = len(self._folders)
        self._folders = [one for one in self._folders if not is_done(one)]
        return before - len(self._folders)


def _is_tuned(row: Row) -> bool:
    return len(row.candidates) > 1


def _missing(families: Sequence[Family]) -> list[Family]:
    """Return what is to be made; families that train alike stay together."""
    require_same_inputs(families)
    return [family for family in families if not is_made(family)]


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
