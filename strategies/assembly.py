"""A method on a task, made from an experiment's settings and the input's shape alone.

Server, workers and sites each make their own: none of it depends on where data is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.config.sections import Choice, Experiment, Settings, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.augmentation import require_augmentable
from knnper.data.examples import Examples, InputSpec
from knnper.data.preprocess import normalizer
from knnper.machine import prepare_process
from knnper.models.catalogue import build_model
from strategies.catalogue import METHODS
from strategies.core.embedding_pool import EmbeddingPool
from strategies.core.method import Method
from strategies.core.task import Task
from strategies.personalizers import PERSONALIZERS


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
    proxy: Callable[[], Examples] | None = None,
    pool: EmbeddingPool | None = None,
    on_trained: Callable[[int, float], None] | None = None,
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
    proxy
        Returns the examples that the server has of its own, if it has any.
    pool
        Where embeddings are looked for first; one of its own by default.
    on_trained
        See `Task`.
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
    task = replace(task, proxy=proxy, pool=pool or EmbeddingPool())
    if on_trained is not None:
        task = replace(task, on_trained=on_trained)
    return Assembly(
        experiment, RandomKey(experiment.run.seed), task, build_method(experiment, task)
    )


def build_method(experiment: Experiment, task: Task) -> Method:
    """Return the experiment's method on ``task``, with what it puts on top."""
    chosen, on_top = experiment.method, experiment.personalization
    method = METHODS[chosen.name].build(task, chosen.settings)
    return PERSONALIZERS[on_top.name].apply(task, method, on_top.settings)


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
        normalize=normalizer(spec, device),
        spec=spec,
        training=training,
        evaluation_batch_size=evaluation_batch_size,
    )
