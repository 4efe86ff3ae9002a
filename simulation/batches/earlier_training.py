"""Reuse the training of finished runs in a sweep: ``knnper sweep --trained RUN``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.experiment_file import relevant_settings
from knnper.server.run_folder import RunFolder
from knnper.settings import dotted
from knnper.simulation.batches.family import (
    Family,
    as_trained,
    load_training,
    training_identity,
)
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.workbench import open_workbench

# The names of settings in results' identities that files call otherwise.
_NAMES_IN_FILES = {"run.seed": "seeds", "run.gpu": "run.gpus_per_client"}


def with_earlier_training(
    families: Sequence[Family], runs: Iterable[Path]
) -> list[Family]:
    """Assign each finished run to the family with the same training.

    Raises RunError if a run fits no family, or two runs fit one; before anything is
    trained. Where all runs of all families are done, the finished runs are not read.
    """
    assigned = list(families)
    if all(family.is_done for family in families):
        return assigned
    for run in runs:
        place = _place_of_family(run, assigned)
        _require_usable_state(run, load_training(run).state_type, assigned[place])
        assigned[place] = replace(assigned[place], earlier=run)
    return assigned


def _place_of_family(run: Path, families: Sequence[Family]) -> int:
    """Return the place of the family with the training of a finished run."""
    folder = RunFolder.open(run)
    if not folder.is_finished():
        raise RunError(
            f"the run in {run} is not done, expected a finished one; finish it first: "
            f"knnper simulate --resume {run}"
        )
    earlier = folder.experiment(experiment_catalogue())
    experiments = [family.experiments[0] for family in families]
    identities = [training_identity(experiment) for experiment in experiments]
    if training_identity(earlier) not in identities:
        differences = [
            list(_differences(experiment, earlier)) for experiment in experiments
        ]
        nearest = min(differences, key=len)
        raise RunError(
            f"the run in {run} has another training than all runs of this sweep: "
            f"{'; '.join(nearest)}. Make the settings equal, or leave the run away to "
            "train again"
        )
    place = identities.index(training_identity(earlier))
    if (other := families[place].earlier) is not None:
        raise RunError(
            f"the runs in {other} and {run} have the same training, expected one run "
            "of each training; leave one of them away"
        )
    return place


def _require_usable_state(run: Path, state_type: type, family: Family) -> None:
    """Reject a state of the server that no run of the family can continue from."""
    by_names = {
        (experiment.method.name, experiment.personalization.name): experiment
        for experiment in family.experiments
    }
    types = {
        open_workbench(experiment).method.state_type for experiment in by_names.values()
    }
    if state_type not in types:
        names = ", ".join(sorted({method for method, _ in by_names}))
        raise RunError(
            f"the server of the run in {run} keeps another state than that of {names}, "
            "which adds to it during training; leave the run away to train again"
        )


def _differences(expected: Experiment, found_experiment: Experiment) -> Iterator[str]:
    """Yield the settings of the training that differ."""
    expected_settings, found_settings = (
        dict(dotted(relevant_settings(as_trained(experiment))))
        for experiment in (expected, found_experiment)
    )
    for key in dict.fromkeys((*found_settings, *expected_settings)):
        value = found_settings.get(key, "nothing")
        other = expected_settings.get(key, "nothing")
        if value != other:
            name = _NAMES_IN_FILES.get(key, key)
            yield f"{name}: found {value}, expected {other}"
