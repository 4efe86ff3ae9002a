"""The one runner of many runs: what is missing is made, by processes side by side.

Every run has a folder named by what it is. A batch that was interrupted, or whose file
grew, makes only what is missing.
"""

import concurrent.futures
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from knnper.errors import RunError
from knnper.experiment import (
    Experiment,
    dotted,
    relevant_settings,
    results_identity,
    to_json,
)
from knnper.lifeline import die_with_parent
from knnper.metrics import gain
from knnper.process import huge_pages_for_workers
from knnper.server.results import figure_of
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import (
    Event,
    Family,
    Tell,
    as_trained,
    is_done,
    make_runs,
    read_json,
    training_identity,
    training_in,
    why_failed,
)
from knnper.simulation.batches.folder import RUNS, Identity, batch_folder
from knnper.simulation.batches.points import (
    Point,
    tested,
    tuning_of,
)
from knnper.simulation.batches.progress import Advance, Told, Tracker
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.origin import INPUTS, inputs_of, require_inputs, split_of
from knnper.simulation.workbench import open_workbench

Plan = Comparison | Sweep
# What a batch calls some of the settings that results depend on.
_TYPED = {"run.seed": "seeds", "run.gpu": "run.gpus_per_client"}
SECONDS_BETWEEN_LOOKS = 1.0
_queue: "SimpleQueue[Told] | None" = None


@dataclass(frozen=True)
class Tried:
    """A point and how it did on validation data."""

    point: Point
    score: float | None  # weighted metric of the seen clients; None where it failed
    failure: str | None


@dataclass(frozen=True)
class Outcome:
    """A point that was run with every seed."""

    point: Point
    runs: Mapping[int, Path]  # folders by seed
    failures: Mapping[int, str] = field(default_factory=dict)  # why, by seed
    tried: Sequence[Tried] = ()  # what it was chosen from, in the order of the grid


def run_batch(
    plan: Plan,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = ("knnper",),
    earlier: Sequence[Path] = (),
) -> list[Outcome]:
    """Make the runs of a plan that are missing in ``folder``; return what was tested.

    ``command`` stands in the runs' manifests; ``earlier`` are finished runs whose
    training is taken over. Raises FolderTakenError and RunError before anything is
    written where that can be known, and RunError where nothing can be compared.
    """
    tracker = Tracker(num_workers)

    def families(experiments: Iterable[Experiment]) -> list[Family]:
        return families_of(
            experiments, folder, command, keeps_training=isinstance(plan, Sweep)
        )

    def make(missing: Sequence[Family], later: Sequence[Family] = ()) -> None:
        require_same_inputs(missing)
        missing = tracker.expect(missing, later)
        advance(tracker.progress())
        for told in run_in_workers(missing, num_workers):
            tracker.note(told)
            advance(tracker.progress())

    first_choice, second_choice, guessed = _stages(plan)
    is_tuned = bool(first_choice or second_choice)
    # What cannot be resumed is refused before anything is written.
    ready = [] if is_tuned else with_earlier_training(families(guessed), earlier)
    with batch_folder(folder, Identity(plan.kind, plan.name)):
        best, tried = dict[str, Point](), dict[str, list[Tried]]()
        for following, later in ((False, [*second_choice, *guessed]), (True, guessed)):
            choices = plan.to_choose_from(best, following=following)
            several = {name: some for name, some in choices.items() if len(some) > 1}
            if several:
                # Nobody knows yet which points are chosen; they take about as long.
                tuning = tuning_of(itertools.chain(*several.values()))
                make(families(tuning), families(later))
            for name, some in choices.items():
                best[name] = some[0]
                if name in several:
                    tried[name] = _tried(some, folder, plan.metric)
                    best[name] = _best(name, tried[name], folder, plan.metric)
        chosen = plan.tested_with(best)
        make(ready or with_earlier_training(families(tested(chosen)), earlier))
    return [
        _outcome(plan, point, folder, tried.get(point.variant, ())) for point in chosen
    ]


def num_steps(plan: Plan) -> int:
    """Return how many rounds and personalisations a batch takes."""
    families = families_of(itertools.chain(*_stages(plan)), Path(), ())
    return sum(family.num_rounds + len(family.runs) for family in families)


def num_runs(plan: Plan, folder: Path) -> tuple[int, int]:
    """Return how many runs a batch takes, and how many of all are in ``folder``."""
    there = {folder_of(one, folder) for one in plan.experiments}
    expected = {folder_of(one, folder) for one in itertools.chain(*_stages(plan))}
    return len(expected), sum(map(is_done, there))


def _stages(plan: Plan) -> tuple[list[Experiment], list[Experiment], list[Experiment]]:
    """Return what is run to choose, then for those that follow, and then to test.

    As if of all that is chosen from the first were chosen.
    """
    tuning, best = list[list[Experiment]](), dict[str, Point]()
    for following in (False, True):
        choices = plan.to_choose_from(best, following=following)
        several = (some for some in choices.values() if len(some) > 1)
        tuning.append(tuning_of(itertools.chain(*several)))
        best |= {name: some[0] for name, some in choices.items()}
    first, second = tuning
    return first, second, tested(plan.tested_with(best))


def _tried(points: Iterable[Point], folder: Path, metric: str) -> list[Tried]:
    found = []
    for point, tuning in ((one, one.tuning) for one in points):
        if tuning is None:
            raise ValueError(f"{point.variant} has nothing to try on validation data")
        path = folder_of(tuning, folder)
        failure, score = why_failed(path), None
        if failure is None:
            score = RunFolder(path).results()["seen"][figure_of(metric, "weighted")]
        found.append(Tried(point, score, failure))
    return found


def _best(name: str, tried: Sequence[Tried], folder: Path, metric: str) -> Point:
    scored = [one for one in tried if one.score is not None]
    if not scored:
        reason = next((one.failure for one in tried if one.failure), "no score")
        raise RunError(
            f"no candidate of the row {name} has a score on validation data; the "
            f"first reason: {reason}. Change its grid, with smaller learning rates "
            "where training diverged; a run is made again when its folder in "
            f"{folder / RUNS} is deleted"
        )
    # The first of equal ones: max keeps it.
    return max(scored, key=lambda one: gain(metric, one.score or 0.0, over=0.0)).point


def _outcome(plan: Plan, point: Point, folder: Path, tried: Sequence[Tried]) -> Outcome:
    paths = {seed: folder_of(run, folder) for seed, run in point.runs.items()}
    reasons = {seed: why_failed(path) for seed, path in paths.items()}
    failures = {seed: reason for seed, reason in reasons.items() if reason is not None}
    if isinstance(plan, Comparison) and point.variant == plan.reference:
        for seed, reason in failures.items():
            what = f"the reference row {point.variant}"
            raise RunError(
                f"{failure_remark(what, seed, reason, paths[seed])}. Without it nobody "
                "can be compared; change its grid or choose another reference"
            )
    runs = {seed: path for seed, path in paths.items() if seed not in failures}
    return Outcome(point, runs, failures, tried)


def failure_remark(what: str, seed: int, reason: str, run: Path) -> str:
    """Return what to tell of a run that failed, and of its folder."""
    again = f"To make it again, delete {run}"
    return f"{what} failed with seed {seed}: {reason}. {again}"


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return where in the folder of a batch a run is: equal results, equal names."""
    return folder / RUNS / results_identity(experiment)[:16]


def families_of(
    experiments: Iterable[Experiment],
    folder: Path,
    command: Sequence[str],
    *,
    keeps_training: bool = False,
) -> list[Family]:
    """Return the runs of a batch, each once, those that train the same together."""
    found: dict[str, dict[Path, Experiment]] = {}
    for experiment in experiments:
        runs = found.setdefault(training_identity(experiment), {})
        runs.setdefault(folder_of(experiment, folder), experiment)
    return [
        Family(
            {path: to_json(one) for path, one in runs.items()},
            next(iter(runs.values())).training.num_rounds,
            tuple(command),
            keeps_training,
        )
        for runs in found.values()
    ]


def require_same_inputs(families: Iterable[Family]) -> None:
    """Refuse runs that were made from other data, or from another split of it."""
    known: dict[tuple[object, str], Any] = {}

    def once(find: Callable[[Experiment], Any], text: str, *sections: str) -> Any:
        """Find what depends on these sections of an experiment alone."""
        document = json.loads(text)
        key = (find, json.dumps([document[section] for section in sections]))
        if key not in known:
            known[key] = find(read_json(text))
        return known[key]

    for folder, text in (run for one in families for run in one.runs.items()):
        if (folder / INPUTS).is_file():
            found = once(inputs_of, text, "data", "model")
            # Before the split, since data of another size may not be split at all.
            require_inputs(folder, found)
            split = once(split_of, text, "data", "partition", "run")
            require_inputs(folder, replace(found, split=split))


def with_earlier_training(
    families: Sequence[Family], runs: Iterable[Path]
) -> list[Family]:
    """Return the families, each with the training of an earlier run that is its own."""
    found = list(families)
    # Where all is made already, nothing is asked of the earlier runs.
    if all(family.is_made for family in families):
        return found
    for run in runs:
        number = _number_of(run, found)
        # Now, so that a batch does not fall over it when others train already.
        _require_use(run, training_in(run).state_type, found[number])
        found[number] = replace(found[number], earlier=run)
    return found


def _number_of(run: Path, families: Sequence[Family]) -> int:
    """Return the place of the one family that trains as a finished run did."""
    folder = RunFolder.open(run)
    if not folder.is_finished():
        raise RunError(
            f"the run in {run} is not done, expected a finished one; go on with it "
            f"first: knnper simulate --resume {run}"
        )
    earlier = folder.experiment(experiment_catalogue())
    experiments = [family.experiments[0] for family in families]
    identities = [training_identity(one) for one in experiments]
    if training_identity(earlier) not in identities:
        differences = [list(_differences(one, earlier)) for one in experiments]
        nearest = min(differences, key=len)
        raise RunError(
            f"the run in {run} was trained otherwise than all that is asked for: "
            f"{'; '.join(nearest)}. Make the settings equal, or "
            "leave the run away to train anew"
        )
    number = identities.index(training_identity(earlier))
    if (other := families[number].earlier) is not None:
        raise RunError(
            f"the runs in {other} and {run} were trained the same, expected one of "
            "each training; leave one of them away"
        )
    return number


def _require_use(run: Path, state_type: type, family: Family) -> None:
    """Refuse a state that none of the family's runs can go on from."""
    kinds = {
        (one.method.name, one.personalization.name): one for one in family.experiments
    }
    types = {open_workbench(one).method.state_type for one in kinds.values()}
    if state_type not in types:
        names = ", ".join(sorted({method for method, _ in kinds}))
        raise RunError(
            f"the server of the run in {run} keeps another state than that of {names} "
            "asked for, which adds to it while it trains; leave the run away to train "
            "anew"
        )


def _differences(expected: Experiment, found: Experiment) -> Iterator[str]:
    here, there = (
        dict(dotted(relevant_settings(as_trained(one)))) for one in (found, expected)
    )
    for key in dict.fromkeys((*here, *there)):
        one, other = here.get(key, "nothing"), there.get(key, "nothing")
        if one != other:
            yield f"{_TYPED.get(key, key)}: found {one}, expected {other}"


def _begin_worker(parent: int, queue: "SimpleQueue[Told]") -> None:
    """Set a worker process up: it ends with its parent, and tells a queue."""
    global _queue
    die_with_parent(parent)
    _queue = queue


def _make_in_worker(
    make: Callable[[Family, Tell], None], number: int, family: Family
) -> None:
    def tell(event: Event) -> None:
        if _queue is not None:
            _queue.put((number, event))

    make(family, tell)


def run_in_workers(
    families: Sequence[Family], num_workers: int
) -> Iterator[Sequence[Told]]:
    """Make the families; yield about once a second what the workers told since."""
    if not families:
        return
    # Spawned: they do not share memory with this process.
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[Told] = context.SimpleQueue()
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, context, _begin_worker, (os.getpid(), queue)
    )
    try:
        with huge_pages_for_workers():
            left = {
                pool.submit(_make_in_worker, make_runs, number, family)
                for number, family in enumerate(families)
            }
        while left:
            done, left = concurrent.futures.wait(
                left, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            told = list[Told]()
            while not queue.empty():
                told.append(queue.get())
            yield told
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(
            "a worker process was killed, most likely because the memory was full; use "
            "fewer of them with --workers. The same command goes on with what is done"
        ) from error
    except BaseException:
        # A family may go on for minutes.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
