"""The experiments of a batch, each of which one process plays alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import load_experiment
from knnper.config.sections import Experiment
from simulation.catalogue import experiment_catalogue
from simulation.partition.settings import PartitionSettings


def batch_experiment(
    document: Mapping[str, Any], overrides: Sequence[str]
) -> Experiment:
    """Return an experiment of a batch, on the serial engine.

    Parameters
    ----------
    document, overrides
        See `load_experiment`.

    Raises
    ------
    ConfigError
        As `load_experiment`, and where the number of threads is not fixed.
    """
    changes = [*overrides, "run.engine=serial"]
    experiment = load_experiment(document, experiment_catalogue(), changes)
    if experiment.run.threads_per_worker == "auto":
        message = (
            "found 'auto', expected a number: the last bits of all runs depend on it, "
            "and what is added later would have that of another machine. With 1, the "
            "default, --workers processes keep the cores busy"
        )
        raise ConfigError([Problem("run.threads_per_worker", message)])
    return experiment


def require_validation_data(experiment: Experiment) -> None:
    """Do nothing unless an experiment is to be tested on validation data it has not.

    Found only after training, nobody would have a result.

    Raises
    ------
    ConfigError
        If it holds nothing out, and is tested on what is held out.
    """
    partition = experiment.partition.settings
    if not isinstance(partition, PartitionSettings):
        return
    if partition.evaluate_on == "validation" and partition.validation_fraction == 0:
        message = (
            "found 0, expected more: settings are chosen on validation data; set it, "
            "as in partition.validation_fraction=0.2, or choose nothing"
        )
        raise ConfigError([Problem("partition.validation_fraction", message)])
