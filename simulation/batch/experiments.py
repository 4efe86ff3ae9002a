"""The experiments of a batch, each of which one process plays alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import load_experiment
from knnper.config.sections import Experiment
from simulation.catalogue import experiment_catalogue


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
