"""`training.precision: auto`: the faster of float32 and bfloat16 on this machine."""

import contextlib
import logging
import math
import statistics
import time
from dataclasses import replace
from typing import get_args

import numpy as np
import torch

from knnper.data.examples import Dataset, Examples
from knnper.errors import RunError
from knnper.experiment import Experiment, Precision
from knnper.seeding import RandomKey
from knnper.strategies.core.assembly import task_of_experiment
from knnper.strategies.core.frozen import of_embeddings
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

log = logging.getLogger(__name__)
_TIMED_STEPS, _TIMES = 5, 5

# Of the time of a step in float32; what saves less is not worth another result.
_WORTH_IT = 0.95


def with_faster_precision(
    experiment: Experiment, dataset: Dataset, device: torch.device
) -> Experiment:
    """Return the experiment with the precision that is faster on this machine."""
    training = experiment.training
    tasks = dict[Precision, Task]()
    with contextlib.suppress(RunError):  # where the CPU cannot run bfloat16
        for precision in get_args(Precision):
            fixed = replace(training, precision=precision)
            variant = replace(experiment, training=fixed)
            tasks[precision] = task_of_experiment(variant, dataset.spec, device)
    size = min(training.batch_size, len(dataset.train))
    batch = dataset.train.examples_at(np.arange(size))

    def step_s(whole: Task) -> float:
        task = of_embeddings(whole)
        examples = batch
        if task is not whole:
            embeddings = whole.embed(whole.model.read(), batch.images)
            examples = Examples(embeddings, batch.labels)
        key = RandomKey(0)
        started = time.perf_counter()
        local_sgd(
            task,
            task.model.read(),
            examples,
            training.learning_rate,
            key,
            num_epochs=_TIMED_STEPS,
        )
        return (time.perf_counter() - started) / _TIMED_STEPS

    # Alternating, since the machine's load may change; the first time warms up.
    times = [
        {name: step_s(task) for name, task in tasks.items()} for _ in range(_TIMES)
    ]
    step_times = {
        name: statistics.median(repetition[name] for repetition in times[1:])
        for name in tasks
    }
    faster = step_times.get("bfloat16", math.inf) < _WORTH_IT * step_times["float32"]
    chosen: Precision = "bfloat16" if faster else "float32"
    durations = ", ".join(
        f"{1000 * seconds:.1f} ms in {name}" for name, seconds in step_times.items()
    )
    # A warning, since results depend on it.
    log.warning("training.precision is %s here: a step takes %s", chosen, durations)
    return replace(experiment, training=replace(training, precision=chosen))
