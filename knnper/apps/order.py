"""What a run configuration asks for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.config.document import from_json
from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import read_experiment
from knnper.config.sections import Experiment
from knnper.machine import with_fixed_threads
from server.run_folder import RunFolder
from simulation.catalogue import experiment_catalogue

APP_FOLDER = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Order:
    """A run that is to be made, or taken up.

    Attributes
    ----------
    experiment
        What is run.
    output
        The run's folder.
    overwrite
        Whether an earlier run in that folder may be deleted.
    resume
        Whether an earlier run in that folder is taken up.
    registry
        The file that says which node is registered under which name; None without
        one.
    """

    experiment: Experiment
    output: Path
    overwrite: bool
    resume: bool
    registry: Path | None

    def require_free(self) -> None:
        """Refuse a folder that is taken.

        Raises
        ------
        RunError
            If it holds a run that may be neither deleted nor taken up.
        """
        if not self.resume:
            RunFolder.require_free(self.output, overwrite=self.overwrite)

    def folder(self) -> RunFolder:
        """Return the run's folder: new, or the one that is taken up."""
        if self.resume:
            return RunFolder.open(self.output)
        return RunFolder.create(self.output, self.experiment, overwrite=self.overwrite)


def order_of(run_config: Mapping[str, object]) -> Order:
    """Return what Flower's run configuration asks for.

    An experiment's relative path is looked up in the app's folder. A run that is taken
    up has the experiment with which it was started, changed by ``set``.

    Raises
    ------
    ConfigError, RunError
        If the experiment is described wrongly, or there is no run to be taken up.
    """
    changes = _changes(str(run_config["set"]))
    resume = bool(run_config["resume"])
    output = str(run_config["output"])
    registry = str(run_config["registry"])
    if resume:
        place = _absolute(output)
        experiment = RunFolder.open(place).experiment(experiment_catalogue(), changes)
    else:
        experiment = with_fixed_threads(_described(run_config, changes))
        place = _absolute(output or f"runs/{experiment.name}")
    return Order(
        experiment=experiment,
        output=place,
        overwrite=bool(run_config["overwrite"]),
        resume=resume,
        registry=_absolute(registry) if registry else None,
    )


def _changes(text: str) -> Sequence[str]:
    """Return the overrides in ``text``: joined by ``;``, or a JSON list.

    Raises
    ------
    ConfigError
        If it begins as a JSON list and is no list of texts.
    """
    if not text.startswith("["):
        return [part for part in text.split(";") if part]
    try:
        changes = json.loads(text)
    except ValueError:
        changes = None
    if isinstance(changes, list) and all(isinstance(one, str) for one in changes):
        return changes
    message = f'found {text!r}, expected KEY=VALUE;KEY=VALUE or ["KEY=VALUE", ...]'
    raise ConfigError([Problem("set", message)], "the run configuration")


def _described(run_config: Mapping[str, object], changes: Sequence[str]) -> Experiment:
    """Return the experiment: a file's, or the one that is in the configuration."""
    document = str(run_config["document"])
    if document:
        return from_json(document, experiment_catalogue(), changes)
    path = APP_FOLDER / str(run_config["experiment"])
    return read_experiment(path, experiment_catalogue(), changes)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()
