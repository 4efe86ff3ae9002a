"""Build the task and the method of an experiment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from knnper.data.augmentation import require_augmentable
from knnper.data.examples import InputSpec
from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, TrainingSettings
from knnper.flat_model import FlatModel
from knnper.models import build_model, can_be_narrower, is_tried_out, narrower
from knnper.own import explained
from knnper.process import known_precision, prepare_process, require_precision
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.strategies.catalogue import method_of, personalizer_of
from knnper.strategies.core.compression import Compressed
from knnper.strategies.core.method import Method
from knnper.strategies.core.optimizers import criterion, require_optimizer
from knnper.strategies.core.private_examples import require_private_model
from knnper.strategies.core.private_updates import private_updates
from knnper.strategies.core.task import Task

Protection = Callable[[Method], Method]


@dataclass(frozen=True)
class Assembly:
    """The model and the method of an experiment, without its clients."""

    experiment: Experiment  # with the settings that building the model has fixed
    key: RandomKey  # the root of all random choices
    task: Task
    method: Method  # with its personalisation on top


@explained()
def task_of_experiment(
    experiment: Experiment,
    spec: InputSpec,
    device: torch.device = torch.device("cpu"),
) -> Task:
    """Build the task; set torch's process-wide options first."""
    require_precision(known_precision(experiment.training.precision), device)
    prepare_process(experiment.run, device)
    return build_task(
        experiment.model,
        experiment.training,
        spec,
        RandomKey(experiment.run.seed),
        evaluation_batch_size=experiment.run.evaluation_batch_size,
        device=device,
    )


def assemble(experiment: Experiment, spec: InputSpec) -> Assembly:
    """Build the model and the method of an experiment."""
    return assemble_with_task(experiment, task_of_experiment(experiment, spec))


@explained()
def assemble_with_task(
    experiment: Experiment, task: Task, protect: Protection | None = None
) -> Assembly:
    """Build the method, and record in the experiment how its model was built.

    ``protect`` wraps the method before its updates are compressed, such as in a site's
    own `UpdateProcessor`.
    """
    chosen, on_top = experiment.method, experiment.personalization
    method = method_of(chosen)(task, chosen.settings)
    method = personalizer_of(on_top)(task, method, on_top.settings)
    if experiment.privacy is not None:
        method = private_updates(task, method, experiment.privacy)
    if protect is not None:
        method = protect(method)
    compression = experiment.training.compression
    if compression is not None:
        method = Compressed(task, method, compression)
    key = RandomKey(experiment.run.seed)
    known = dict(_tried_out(experiment.model, task.model))
    if task.frozen:
        known["frozen"] = task.frozen
    model = _with_settings(experiment.model, known)
    return Assembly(replace(experiment, model=model), key, task, method)


def _tried_out(choice: Choice[Settings], model: FlatModel) -> Mapping[str, Any]:
    """Return the memory format that a timing trial chose, as a setting.

    All processes of a run must use it, since it fixes the order of the weights in the
    vector. With the setting they need no trial.
    """
    if not is_tried_out(choice):
        return {}
    return {"memory_format": model.module.memory_format}


def _with_settings(
    choice: Choice[Settings], known: Mapping[str, Any]
) -> Choice[Settings]:
    """Return a choice with other values of some settings, also in its local copy."""
    if not known:
        return choice
    local = None if choice.local is None else replace(choice.local, **known)
    return replace(choice, settings=replace(choice.settings, **known), local=local)


def build_task(
    model: Choice[Settings],
    training: TrainingSettings,
    spec: InputSpec,
    key: RandomKey,
    *,
    evaluation_batch_size: int,
    device: torch.device = torch.device("cpu"),
) -> Task:
    """Build the task of training ``model`` on inputs of the form ``spec``."""
    require_augmentable(training.augmentation, spec)
    weights = training.class_weights
    if isinstance(weights, tuple) and len(weights) != spec.num_classes:
        message = (
            f"found {len(weights)} values, expected one for each of the data's "
            f"{spec.num_classes} classes"
        )
        raise ConfigError([Problem("training.class_weights", message)])

    def build(chosen: Choice[Settings]) -> FlatModel:
        built = build_model(chosen, spec, key.child("model"), device)
        built.module.criterion = criterion(training.loss)
        return built

    built = build(model)
    model = _with_settings(model, _tried_out(model, built))
    task = Task(
        model=built,
        initial_weights=built.read(),
        fresh_weights=lambda rng: build_model(model, spec, rng).read(),
        normalize=built.normalizer(spec),
        spec=spec,
        training=training,
        evaluation_batch_size=evaluation_batch_size,
        frozen=built.frozen,
        key=key,
        narrower=(lambda ratio: build(narrower(model, ratio)))
        if can_be_narrower(model)
        else None,
    )
    require_optimizer(task)
    require_private_model(task)
    return task
