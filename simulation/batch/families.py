"""Runs by what they train, in folders that are named by what they are."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from knnper.config.document import from_json, results_identity, to_document
from knnper.config.sections import Experiment
from simulation.batch.inputs import INPUTS, Inputs, inputs_of, require_inputs
from simulation.batch.playing import Family, Order, is_done, training_identity
from simulation.catalogue import experiment_catalogue

Advance = Callable[[int, bool], None]
"""``(number, made) -> None``: so much more is done; made now, or before."""


def key_of(experiment: Experiment) -> str:
    """Return a short name of an experiment's folder: equal results, equal names."""
    return results_identity(experiment)[:16]


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return where in the folder of a batch an experiment's run is."""
    return folder / "runs" / key_of(experiment)


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

    Raises
    ------
    RunError
        As `require_inputs`.
    """
    known: dict[str, Inputs] = {}
    for family in families:
        folders = [order.folder for order in family.orders]
        made = [folder for folder in folders if (folder / INPUTS).is_file()]
        if not made:
            continue
        experiment = from_json(family.orders[0].experiment, experiment_catalogue())
        document = to_document(experiment)
        # Of what trains the same, data and weights are the same.
        key = json.dumps([document["data"], document["model"]])
        known[key] = known.get(key) or inputs_of(experiment)
        for folder in made:
            require_inputs(folder, known[key])


def is_made(family: Family) -> bool:
    """Return whether all runs of a family ended."""
    return all(is_done(order.folder) for order in family.orders)
