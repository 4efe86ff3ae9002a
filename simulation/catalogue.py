"""All that an experiment can choose from, and what does not go together."""

from collections.abc import Iterable, Sequence

from knnper.config.catalogue import Catalogue
from knnper.config.errors import Problem
from knnper.config.sections import Experiment
from knnper.data.catalogue import DATA_SETS
from knnper.data.site.agreement import SITES
from simulation.partition.catalogue import PARTITIONS
from simulation.partition.settings import CountedSettings, PartitionSettings
from strategies.experiments import (
    SITE_DATA_SETS,
    SITE_PARTITIONS,
    catalogue_of,
    settings_types,
)
from strategies.personalizers import PERSONALIZERS

# Rounding must not make a client disappear: 0.1 of 30 is 3.0000000000000004.
_TOLERANCE = 1e-9


def experiment_catalogue() -> Catalogue:
    """Return the catalogue of everything this project ships."""
    return catalogue_of(
        {**settings_types(DATA_SETS), **SITE_DATA_SETS},
        {**settings_types(PARTITIONS), **SITE_PARTITIONS},
        check_experiment,
    )


def check_experiment(experiment: Experiment) -> Sequence[Problem]:
    """Return what in the data's sections does not go together."""
    return (
        *_site_problems(experiment),
        *_participation_problems(experiment),
        *_proxy_problems(experiment),
    )


def _site_problems(experiment: Experiment) -> Iterable[Problem]:
    data, partition = experiment.data.name, experiment.partition.name
    if (data == SITES) != (partition == SITES):
        message = (
            f"found {partition} with data of {data}, expected {{name: sites}} for "
            "both or for neither: data that stays with the sites is not dealt"
        )
        yield Problem("partition.name", message)


def _proxy_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield that the server lacks the examples which a personalisation samples from."""
    partition, on_top = experiment.partition.settings, experiment.personalization.name
    if not isinstance(partition, PartitionSettings) or partition.proxy_fraction > 0:
        return
    if PERSONALIZERS[on_top].needs_proxy:
        message = (
            f"found 0 with {on_top}, which samples from examples of the server's; "
            "expected a part that the server keeps, such as 0.05"
        )
        yield Problem("partition.proxy_fraction", message)


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
