"""The catalogue of an experiment's choices, and checks across its sections."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from knnper.data.catalogue import DATA_SETS, load_data
from knnper.data.own_data import OWN_DATA
from knnper.data.site_task import SITES, SitesSettings, sites_settings, task_of
from knnper.errors import ConfigError, Problem, RunError
from knnper.experiment import Experiment, is_timed_by_clients
from knnper.experiment_file import Catalogue
from knnper.own import Door
from knnper.settings import Choice, plain, shown
from knnper.simulation.partition.own import OWN_PARTITION
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.partition.settings import CountedSettings, PartitionSettings
from knnper.strategies.catalogue import (
    KINDS,
    SITE_DATA_SETS,
    SITE_PARTITIONS,
    OpenDoor,
    catalogue_of,
    personalizer_of,
    settings_types,
)
from knnper.strategies.core.method import NoSettings

# Rounding must not make a client disappear: 0.1 of 30 is 3.0000000000000004.
_TOLERANCE = 1e-9


def experiment_catalogue(door: OpenDoor = Door) -> Catalogue:
    """Return the catalogue of all built-in choices.

    ``door`` opens users' code in the folder that an experiment names.
    """
    return catalogue_of(
        {**settings_types(DATA_SETS), **SITE_DATA_SETS},
        {**settings_types(PARTITIONS), **SITE_PARTITIONS},
        check_experiment,
        {**KINDS, "data": OWN_DATA, "partition": OWN_PARTITION},
        door,
    )


def check_experiment(experiment: Experiment) -> Sequence[Problem]:
    """Return problems of the sections on data with each other."""
    problems = list[Problem]()
    settings = experiment.partition.settings
    data, partition = experiment.data.name, experiment.partition.name
    if (data == SITES) != (partition == SITES):
        message = (
            f"found {partition} with data of {data}, expected {{name: sites}} for "
            "both or for neither: data that stays with the sites is not split"
        )
        problems.append(Problem("partition.name", message))
    if isinstance(settings, CountedSettings):
        problems.extend(_participation_problems(experiment, settings))
    on_top = experiment.personalization
    if (
        isinstance(settings, PartitionSettings)
        and settings.proxy_fraction == 0
        and personalizer_of(on_top).needs_proxy
    ):
        message = (
            f"found 0 with {on_top.name}, which samples from the server's examples; "
            "expected a fraction that the server keeps, such as 0.05"
        )
        problems.append(Problem("partition.proxy_fraction", message))
    return problems


def _participation_problems(
    experiment: Experiment, partition: CountedSettings
) -> Iterable[Problem]:
    """Yield a problem if no client would ever train."""
    num_clients, unseen_fraction = partition.num_clients, partition.unseen_fraction
    num_seen = num_clients - int(unseen_fraction * num_clients + 0.5)
    participation = experiment.training.participation
    if num_seen < 1:
        message = (
            f"found {unseen_fraction} of {num_clients} clients, which leaves none to "
            "train; expected a smaller part, or more clients"
        )
        yield Problem("partition.unseen_fraction", message)
    elif participation * num_seen < 1 - _TOLERANCE:
        message = (
            f"found {participation} of {num_seen} seen clients, which is less than one "
            f"client a round; expected at least {1 / num_seen:.3g}"
        )
        yield Problem("training.participation", message)


def over_sites(experiment: Experiment) -> Experiment:
    """Replace the central data of an experiment by data that stays with the sites."""
    if experiment.data.name == SITES:
        return experiment
    dataset = load_data(experiment.data)
    return replace(
        experiment,
        data=Choice(SITES, sites_settings(task_of(dataset))),
        partition=Choice(SITES, NoSettings()),
    )


def require_central(experiment: Experiment) -> None:
    """Reject an experiment that needs real clients."""
    if isinstance(experiment.data.settings, SitesSettings):
        raise RunError(
            "the experiment is over data that stays with the sites, so it can be "
            "neither simulated nor audited here; run it on them with `knnper fed "
            "submit`, or name a data set in the section data and how it is split in "
            "the section partition"
        )
    training = experiment.training
    if is_timed_by_clients(training):
        message = (
            f"found {shown(plain(training.timing))} without training.devices; set the "
            "speed of the simulated clients, or leave training.timing out"
        )
        raise ConfigError([Problem("training.timing", message)], experiment.name)
