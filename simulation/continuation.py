"""Continue a finished run with more rounds, in a new folder."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from knnper.errors import ConfigError, Problem, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import read_experiment, relevant_settings, results_identity
from knnper.server.checkpoints import Checkpoint, CheckpointFolder
from knnper.server.run_folder import EXPERIMENT, RunFolder
from knnper.settings import dotted, shown
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.origin import inputs_of, keep_inputs, require_inputs, sign_as
from knnper.simulation.trained_model import ended_with
from knnper.simulation.workbench import CLIENTS, Workbench, open_workbench
from knnper.strategies.catalogue import method_of

_NUM_ROUNDS = "training.num_rounds"


def begin_continuation(
    source: Path, changes: Sequence[str], target: Path, *, overwrite: bool = False
) -> tuple[Workbench, RunFolder]:
    """Copy the rounds of a finished run to a new folder, to make more rounds.

    Parameters
    ----------
    source
        The finished run's folder; nothing in it changes.
    changes
        ``KEY=VALUE``: a larger ``training.num_rounds``, and settings of the section
        ``run`` that change no result.
    target
        The new folder.
    overwrite
        Whether a run in the new folder is deleted first.

    Raises
    ------
    ConfigError
        If the changes would change more than the number of rounds.
    RunError
        If the run is not finished, or its data, code or last state has changed.
    """
    folder = RunFolder.open(source)
    if not folder.is_finished():
        raise RunError(
            f"the run in {source} is not done, expected a finished run; resume it "
            f"first: --resume {source}"
        )
    if target.resolve() == source.resolve():
        raise RunError(f"{target} is the finished run's own folder; give a new one")
    RunFolder.require_free(target, overwrite=overwrite)
    before = folder.experiment(experiment_catalogue())
    experiment = _with_more_rounds(folder, before, changes)
    bench = open_workbench(experiment)
    inputs = inputs_of(experiment)
    require_inputs(source, inputs, "start again in a new folder")
    folder.require_same_conditions(experiment, bench.roster.split)
    ended = ended_with(folder, before, bench)
    new = RunFolder.create(target, bench.experiment, overwrite=overwrite)
    copy_training(folder, ended.last, new, results_identity(bench.experiment))
    if folder.tensorboard.is_dir():
        shutil.copytree(folder.tensorboard, new.tensorboard)
    sign_as(new.path, source)
    keep_inputs(new.path, inputs)
    return bench, new


def _with_more_rounds(
    folder: RunFolder, before: Experiment, changes: Sequence[str]
) -> Experiment:
    """Read the experiment of a run with more rounds; reject any other change."""
    source = folder.path / EXPERIMENT
    after = read_experiment(source, experiment_catalogue(), changes)
    problems = list(_other_changes(before, after))
    num_rounds = before.training.num_rounds
    new_num_rounds = after.training.num_rounds
    if new_num_rounds <= num_rounds:
        message = (
            f"found {new_num_rounds}, expected more than the {num_rounds} rounds of "
            f"the run in {folder.path}; give --set {_NUM_ROUNDS}={2 * num_rounds}, say"
        )
        problems.append(Problem(_NUM_ROUNDS, message))
    method = method_of(after.method)
    if method.needs_num_rounds:
        message = (
            f"{method.title} cannot make more rounds than it began with: "
            f"{method.needs_num_rounds}; start again with the larger number"
        )
        problems.append(Problem("method", message))
    privacy = after.privacy
    if privacy is not None and privacy.noise_multiplier is None:
        message = (
            "found null, expected the noise multiplier of the finished run: noise that "
            "follows from epsilon depends on the number of rounds; start again"
        )
        problems.append(Problem("privacy.noise_multiplier", message))
    if problems:
        raise ConfigError(problems, str(source))
    return after


def _other_changes(before: Experiment, after: Experiment) -> Iterator[Problem]:
    """Yield the settings, except the rounds, that differ and change results."""
    old = dict(dotted(relevant_settings(before)))
    new = dict(dotted(relevant_settings(after)))
    for experiment, settings in ((before, old), (after, new)):
        settings["model.memory_format"] = getattr(
            experiment.model.settings, "memory_format", None
        )
    for place in sorted(old.keys() | new.keys()):
        if place != _NUM_ROUNDS and old.get(place) != new.get(place):
            message = (
                f"found {shown(new.get(place))}, expected {shown(old.get(place))} as "
                f"in the finished run: nothing but {_NUM_ROUNDS} may change"
            )
            yield Problem(place, message)


def copy_training(
    source: RunFolder, last: Checkpoint, target: RunFolder, identity: str
) -> None:
    """Copy the rounds of a run to another folder, so that it resumes from them.

    ``last`` is the last checkpoint; ``identity`` is that of the experiment in
    ``target``.
    """
    states = source.path / CLIENTS
    if states.is_dir():
        shutil.copytree(states, target.path / CLIENTS, dirs_exist_ok=True)
    target.drop_rounds_after(0)
    for record in source.rounds():
        target.append_round(record)
    checkpoints = CheckpointFolder(target.checkpoints, identity)
    checkpoints.save(last.server_round, last.state, last.history, last.earlier)
