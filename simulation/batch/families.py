"""Runs by what they train, in folders that are named by what they are."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from knnper.config.document import from_json, results_identity
from knnper.config.sections import Experiment
from simulation.batch.folder import RUNS
from simulation.batch.inputs import (
    INPUTS,
    Inputs,
    inputs_of,
    require_inputs,
    split_of,
)
from simulation.batch.playing import (
    Family,
    Order,
    is_done,
    why_failed,
)
from simulation.batch.shared_training import training_identity
from simulation.catalogue import experiment_catalogue

T = TypeVar("T")


def key_of(experiment: Experiment) -> str:
    """Return a short name of an experiment's folder: equal results, equal names."""
    return results_identity(experiment)[:16]


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return where in the folder of a batch an experiment's run is."""
    return folder / RUNS / key_of(experiment)


def by_seed(
    experiments: Mapping[int, Experiment], folder: Path
) -> tuple[dict[int, Path], dict[int, str]]:
    """Return the folders of the runs that have results, and why the others have none.

    Parameters
    ----------
    experiments
        What was run, by seed.
    folder
        Of the batch.
    """
    paths = {seed: folder_of(run, folder) for seed, run in experiments.items()}
    reasons = {seed: why_failed(path) for seed, path in paths.items()}
    failures = {seed: reason for seed, reason in reasons.items() if reason is not None}
    runs = {seed: path for seed, path in paths.items() if seed not in failures}
    return runs, failures


def failure_remark(what: str, seed: int, reason: str, run: Path) -> str:
    """Return what to tell of a run that failed.

    Parameters
    ----------
    what
        Was run.
    seed
        With which it failed.
    reason
        Why.
    run
        Its folder.
    """
    again = f"To make it again, delete {run}"
    return f"{what} failed with seed {seed}: {reason}. {again}"


def families_of(
    experiments: Iterable[Experiment],
    folder: Path,
    command: Sequence[str],
    *,
    keeps_training: bool = False,
) -> list[Family]:
    """Return the runs of a batch, each once, those that train the same together.

    Parameters
    ----------
    experiments
        What to run.
    folder
        Holds a folder for each run.
    command, keeps_training
        See `Family`.
    """
    found: dict[str, dict[Path, Experiment]] = {}
    for experiment in experiments:
        runs = found.setdefault(training_identity(experiment), {})
        runs.setdefault(folder_of(experiment, folder), experiment)
    return [
        _family(runs, tuple(command), keeps_training=keeps_training)
        for runs in found.values()
    ]


def _family(
    runs: Mapping[Path, Experiment], command: tuple[str, ...], *, keeps_training: bool
) -> Family:
    first = next(iter(runs.values()))
    return Family(
        orders=tuple(Order.of(run, folder) for folder, run in runs.items()),
        num_rounds=first.training.num_rounds,
        command=command,
        keeps_training=keeps_training,
    )


def require_same_inputs(families: Iterable[Family]) -> None:
    """Do nothing if all runs that are there were made from the data as it is now.

    And from the same split of it, which other code may deal in another way.

    Raises
    ------
    RunError
        As `require_inputs`.
    DataError
        If the data cannot be loaded or dealt.
    """
    inputs: dict[str, Inputs] = {}
    splits: dict[str, str] = {}
    for order in (order for family in families for order in family.orders):
        if not (order.folder / INPUTS).is_file():
            continue
        found = _once(inputs, order, ("data", "model"), inputs_of)
        # Before the split, since data of another size may not be dealt at all.
        require_inputs(order.folder, found)
        split = _once(splits, order, ("data", "partition", "run"), split_of)
        require_inputs(order.folder, replace(found, split=split))


def _once(
    known: dict[str, T],
    order: Order,
    sections: Iterable[str],
    find: Callable[[Experiment], T],
) -> T:
    """Return what depends on these sections of an order alone, found only once."""
    document = json.loads(order.experiment)
    key = json.dumps([document[section] for section in sections])
    if key not in known:
        known[key] = find(from_json(order.experiment, experiment_catalogue()))
    return known[key]


def is_made(family: Family) -> bool:
    """Return whether all runs of a family ended."""
    return all(is_done(order.folder) for order in family.orders)
