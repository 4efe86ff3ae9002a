"""A method on a task, made from an experiment's settings and the input's shape alone.

Server, workers and sites each make their own: none of it depends on where data is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.config.sections import Choice, Experiment, Settings, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.augmentation import require_augmentable
from knnper.data.examples import InputSpec
from knnper.data.preprocess import Normalizer
from knnper.machine import prepare_process
from knnper.models.catalogue import build_model
from strategies.catalogue import METHODS
from strategies.core.method import Method
from strategies.core.task import Task


@dataclass(frozen=True)
class Assembly:
    """What an experiment stands for, but for its clients.

    Attributes
    ----------
    experiment
        Its settings.
    key
        The root of all its random choices.
    task
        What is learned.
    method
        How.
    """

    experiment: Experiment
    key: RandomKey
    task: Task
    method: Method


def assemble(
    experiment: Experiment,
    spec: InputSpec,
    device: torch.device = torch.device("cpu"),
) -> Assembly:
    """Build model and method; set what torch takes from the whole process.

    Parameters
    ----------
    experiment
        Its settings.
    spec
        What a model must know about the data.
    device
        Where the model computes; `compute_device` says it of a process that plays
        clients. Data, records and whatever the method returns stay on the CPU.
    """
    prepare_process(experiment.run, device)
    task = build_task(
        experiment.model,
        experiment.training,
        spec,
        RandomKey(experiment.run.seed),
        evaluation_batch_size=experiment.run.evaluation_batch_size,
        device=device,
    )
    entry = METHODS[experiment.method.name]
    method = entry.build(task, experiment.method.settings, experiment.personalization)
    return Assembly(experiment, RandomKey(experiment.run.seed), task, method)


def build_task(
    model: Choice[Settings],
    training: TrainingSettings,
    spec: InputSpec,
    key: RandomKey,
    *,
    evaluation_batch_size: int,
    device: torch.device = torch.device("cpu"),
) -> Task:
    """Return the task of training ``model`` on inputs as ``spec`` says.

    Parameters
    ----------
    model, training
        The experiment's sections.
    spec
        What a model must know about the data.
    key
        The experiment's root key: initial weights depend on it.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    device
        Where the model computes.

    Raises
    ------
    ConfigError
        If the model does not take such inputs, or these cannot be augmented so.
    """
    require_augmentable(training.augmentation, spec)

    def fresh_weights(rng: RandomKey) -> Tensor:
        return build_model(model, spec, rng).read()

    built = build_model(model, spec, key.child("model"), device)
    return Task(
        model=built,
        initial_weights=built.read(),
        fresh_weights=fresh_weights,
        normalize=Normalizer(spec, device),
        spec=spec,
        training=training,
        evaluation_batch_size=evaluation_batch_size,
    )
