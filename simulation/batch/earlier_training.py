"""Finished runs whose training a batch need not make again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knnper.config.document import dotted, from_json, relevant_settings
from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from server.run_folder import RunFolder
from simulation.batch.families import is_made
from simulation.batch.playing import Family
from simulation.batch.shared_training import as_trained, training_identity, training_in
from simulation.catalogue import experiment_catalogue
from simulation.workbench import open_workbench

_TYPED = {"run.seed": "seeds", "run.gpu": "run.gpus_per_client"}
"""What a batch calls some of the settings that results depend on."""


def with_earlier_training(
    families: Sequence[Family], runs: Iterable[Path]
) -> list[Family]:
    """Return the families, each with the training of an earlier run that is its own.

    Where all is made already, nothing is asked of the earlier runs.

    Parameters
    ----------
    families
        Of a batch.
    runs
        Folders of finished runs.

    Raises
    ------
    RunError
        If a folder holds no finished run, or one that no family trains like, if two
        trained the same, and as `training_in`.
    CheckpointError, DataError
        As `training_in`.
    """
    found = list(families)
    if all(is_made(family) for family in families):
        return found
    for run in runs:
        number = _number_of(run, found)
        # Now, so that a batch does not fall over it when others train already.
        _require_use(run, training_in(run).state_type, found[number])
        found[number] = replace(found[number], earlier=run)
    return found


def _number_of(run: Path, families: Sequence[Family]) -> int:
    """Return the place of the one family that trains as a run did."""
    earlier = _finished(run)
    experiments = [_experiments(family)[0] for family in families]
    identities = [training_identity(one) for one in experiments]
    if training_identity(earlier) not in identities:
        raise RunError(_no_match(run, earlier, experiments))
    number = identities.index(training_identity(earlier))
    other = families[number].earlier
    if other is not None:
        raise RunError(
            f"the runs in {other} and {run} were trained the same, expected one of "
            "each training; leave one of them away"
        )
    return number


def _finished(run: Path) -> Experiment:
    folder = RunFolder.open(run)
    if not folder.is_finished():
        raise RunError(
            f"the run in {run} is not done, expected a finished one; go on with it "
            f"first: knnper simulate --resume {run}"
        )
    return folder.experiment(experiment_catalogue())


def _require_use(run: Path, state_type: type, family: Family) -> None:
    """Refuse a state that none of the family's runs can go on from."""
    kinds = {
        (one.method.name, one.personalization.name): one for one in _experiments(family)
    }
    types = {open_workbench(one).method.state_type for one in kinds.values()}
    if state_type not in types:
        names = ", ".join(sorted({method for method, _ in kinds}))
        raise RunError(
            f"the server of the run in {run} keeps another state than that of {names} "
            "asked for, which adds to it while it trains; leave the run away to train "
            "anew"
        )


def _experiments(family: Family) -> list[Experiment]:
    catalogue = experiment_catalogue()
    return [from_json(order.experiment, catalogue) for order in family.orders]


def _no_match(run: Path, earlier: Experiment, others: Iterable[Experiment]) -> str:
    found = _settings(earlier)
    differences = [list(_differences(_settings(one), found)) for one in others]
    nearest = min(differences, key=len)
    return (
        f"the run in {run} was trained otherwise than all that is asked for: "
        f"{'; '.join(nearest)}. Make the settings equal, or leave the run away to "
        "train anew"
    )


def _settings(experiment: Experiment) -> Mapping[str, Any]:
    return dict(dotted(relevant_settings(as_trained(experiment))))


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[str]:
    for key in dict.fromkeys((*found, *expected)):
        here, there = found.get(key, "nothing"), expected.get(key, "nothing")
        if here != there:
            yield f"{_TYPED.get(key, key)}: found {here}, expected {there}"
