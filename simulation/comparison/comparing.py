"""A comparison from its file to its table, in as many steps as it is given."""

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from server.run_folder import RunFolder
from simulation.comparison.playing import (
    FAILED,
    Order,
    is_done,
    play,
    training_identity,
)
from simulation.comparison.settings import Candidate, Comparison, Row, key_of

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Scored:
    """A candidate and how it did on validation data.

    Attributes
    ----------
    candidate
        What was tried.
    score
        Accuracy of the personalised models of the seen clients, weighted by their
        validation data; None where the run failed.
    """

    candidate: Candidate
    score: float | None


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
    """

    row: Row
    tried: Sequence[Scored]
    chosen: Candidate
    runs: Mapping[int, Path]


def num_runs(comparison: Comparison) -> int:
    """Return how many runs a comparison takes."""
    tuned = sum(len(row.candidates) for row in comparison.rows if _is_tuned(row))
    return tuned + len(comparison.rows) * len(comparison.seeds)


def compare(
    comparison: Comparison, folder: Path, num_workers: int, advance: Advance
) -> list[Outcome]:
    """Make all runs that are missing in ``folder``; return how each row was chosen.

    Parameters
    ----------
    comparison
        What to run.
    folder
        Each run has a folder of its own in it, named by what it is: a comparison
        that was interrupted, or whose file grew, makes only what is missing.
    num_workers
        Processes side by side; what they compute does not depend on it.
    advance
        Told of the number of runs that are done.

    Raises
    ------
    RunError
        If all candidates of a row fail, or a chosen one does when it is tested.
    """
    tuning = [
        candidate.tuning
        for row in comparison.rows
        if _is_tuned(row)
        for candidate in row.candidates
    ]
    _make(tuning, folder, num_workers, advance)
    outcomes = [_choose(row, comparison.seeds, folder) for row in comparison.rows]
    final = [
        outcome.chosen.tested(seed) for outcome in outcomes for seed in comparison.seeds
    ]
    _make(final, folder, num_workers, advance)
    for outcome in outcomes:
        for path in outcome.runs.values():
            _require_results(outcome.row, path)
    return outcomes


def _is_tuned(row: Row) -> bool:
    return len(row.candidates) > 1


def _folder_of(experiment: Experiment, folder: Path) -> Path:
    return folder / "runs" / key_of(experiment)


def _make(
    experiments: Iterable[Experiment],
    folder: Path,
    num_workers: int,
    advance: Advance,
) -> None:
    """Make the runs that are missing; families that train alike stay together."""
    families: dict[str, list[Order]] = {}
    for experiment in experiments:
        order = Order.of(experiment, _folder_of(experiment, folder))
        family = families.setdefault(training_identity(experiment), [])
        if order in family:
            advance(1)
        else:
            family.append(order)
    missing = []
    for family in families.values():
        if all(is_done(order.folder) for order in family):
            advance(len(family))
        else:
            missing.append(family)
    for size in _in_processes(missing, num_workers):
        advance(size)


def _in_processes(
    families: Sequence[Sequence[Order]], num_workers: int
) -> Iterator[int]:
    """Play the families; yield the number of runs of each that is done."""
    if not families:
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=context)
    try:
        sizes = {pool.submit(play, family): len(family) for family in families}
        for future in concurrent.futures.as_completed(sizes):
            future.result()
            yield sizes[future]
    except BaseException:
        # What runs now would go on for minutes, and can be taken up again.
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _choose(row: Row, seeds: Sequence[int], folder: Path) -> Outcome:
    tried = [Scored(candidate, None) for candidate in row.candidates]
    chosen = row.candidates[0]
    if _is_tuned(row):
        tried = [
            Scored(one, _score(_folder_of(one.tuning, folder)))
            for one in row.candidates
        ]
        chosen = _best(row, tried)
    runs = {seed: _folder_of(chosen.tested(seed), folder) for seed in seeds}
    return Outcome(row, tried, chosen, runs)


def _best(row: Row, tried: Sequence[Scored]) -> Candidate:
    scored = [(one.score, one.candidate) for one in tried if one.score is not None]
    if not scored:
        raise RunError(
            f"every candidate of the row {row.name} failed on validation data; "
            "expected one at least that trains. Widen its grid, towards smaller "
            "learning rates for one"
        )
    best, chosen = scored[0]
    for score, candidate in itertools.islice(scored, 1, None):
        if score > best:
            best, chosen = score, candidate
    return chosen


def _score(path: Path) -> float | None:
    if (path / FAILED).is_file():
        return None
    score: float | None = RunFolder(path).results()["seen"]["accuracy_weighted"]
    return score


def _require_results(row: Row, path: Path) -> None:
    if (path / FAILED).is_file():
        raise RunError(
            f"the row {row.name} failed when it was tested: "
            f"{(path / FAILED).read_text().strip()}. Its folder is {path}"
        )
