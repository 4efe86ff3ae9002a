"""All that an experiment can choose from, and what does not go together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from knnper.config.catalogue import Catalogue, SettingsTypes
from knnper.config.errors import Problem
from knnper.config.sections import Experiment, Settings
from knnper.data.catalogue import DATA_SETS
from knnper.models.catalogue import MODELS
from simulation.partition.catalogue import PARTITIONS
from simulation.partition.settings import CountedSettings
from strategies.catalogue import METHODS

# Rounding must not make a client disappear: 0.1 of 30 is 3.0000000000000004.
_TOLERANCE = 1e-9


class _Entry(Protocol):
    """What the tables of data sets, partitions, models and methods have in common."""

    @property
    def settings_type(self) -> type[Settings]:
        """Return what the section takes beside the name."""


def experiment_catalogue() -> Catalogue:
    """Return the catalogue of everything this project ships."""
    return Catalogue(
        data=_settings_types(DATA_SETS),
        partition=_settings_types(PARTITIONS),
        model=_settings_types(MODELS),
        method=_settings_types(METHODS),
        personalization={
            name: spec.personalization_type for name, spec in METHODS.items()
        },
        check=check_experiment,
    )


def check_experiment(experiment: Experiment) -> Sequence[Problem]:
    """Return what in a valid experiment does not go together."""
    method = METHODS[experiment.method.name]
    return (*_participation_problems(experiment), *method.check(experiment))


def _settings_types(entries: Mapping[str, _Entry]) -> SettingsTypes:
    return {name: entry.settings_type for name, entry in entries.items()}


def _participation_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield why no client would ever train, where the partition's size is known."""
    partition = experiment.partition.settings
    if not isinstance(partition, CountedSettings):
        return
    num_clients, unseen_fraction = partition.num_clients, partition.unseen_fraction
    num_seen = num_clients - int(unseen_fraction * num_clients + 0.5)
    if num_seen < 1:
        message = (
            f"found {unseen_fraction} of {num_clients} clients, which leaves none to "
            "train; expected a smaller part, or more clients"
        )
        yield Problem("partition.unseen_fraction", message)
        return
    participation = experiment.training.participation
    if participation * num_seen < 1 - _TOLERANCE:
        message = (
            f"found {participation} of {num_seen} seen clients, which is less than one "
            f"client a round; expected at least {1 / num_seen:.3g}"
        )
        yield Problem("training.participation", message)
