"""Finished runs whose training a batch need not make again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knnper.config.document import dotted, from_json, relevant_settings
from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from server.run_folder import RunFolder
from simulation.batch.playing import Family
from simulation.batch.shared_training import as_trained, training_identity
from simulation.catalogue import experiment_catalogue


def with_earlier_training(
    families: Sequence[Family], runs: Iterable[Path]
) -> list[Family]:
    """Return the families, those with the earlier run that have one trained as they.

    Parameters
    ----------
    families
        Of a batch.
    runs
        Folders of finished runs.

    Raises
    ------
    RunError
        If a folder holds no finished run, or one that no family trains like.
    """
    found = list(families)
    for run in runs:
        earlier = _finished(run)
        identity = training_identity(earlier)
        matching = [one for one in found if _identity(one) == identity]
        if not matching:
            raise RunError(_no_match(run, earlier, map(_first, found)))
        found = [replace(one, earlier=run) if one in matching else one for one in found]
    return found


def _finished(run: Path) -> Experiment:
    folder = RunFolder.open(run)
    if not folder.is_finished():
        raise RunError(
            f"the run in {run} is not done, expected a finished one; go on with it "
            f"first: knnper simulate --resume {run}"
        )
    return folder.experiment(experiment_catalogue())


def _first(family: Family) -> Experiment:
    return from_json(family.orders[0].experiment, experiment_catalogue())


def _identity(family: Family) -> str:
    return training_identity(_first(family))


def _no_match(run: Path, earlier: Experiment, others: Iterable[Experiment]) -> str:
    found = _settings(earlier)
    differences = [list(_differences(_settings(one), found)) for one in others]
    nearest = min(differences, key=len)
    return (
        f"the run in {run} was trained otherwise than all that is asked for: "
        f"{'; '.join(nearest)}."
        " Make the settings equal with --set, or leave the run away to train anew"
    )


def _settings(experiment: Experiment) -> Mapping[str, Any]:
    return dict(dotted(relevant_settings(as_trained(experiment))))


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[str]:
    for key in dict.fromkeys((*found, *expected)):
        here, there = found.get(key, "nothing"), expected.get(key, "nothing")
        if here != there:
            yield f"{key}: found {here}, expected {there}"
