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
from knnper.strategies.catalogue import task_of_experiment
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
    """Return the experiment with the precision in which its steps are faster here."""
    training, tasks = experiment.training, dict[Precision, Task]()
    with contextlib.suppress(RunError):  # where the CPU cannot run bfloat16
        for precision in get_args(Precision):
            fixed = replace(training, precision=precision)
            one = replace(experiment, training=fixed)
            tasks[precision] = task_of_experiment(one, dataset.spec, device)
    size = min(training.batch_size, len(dataset.train))
    batch = dataset.train.examples_at(np.arange(size))

    def step_s(whole: Task) -> float:
        task, examples = of_embeddings(whole), batch
        if task is not whole:
            embeddings = whole.embed(whole.model.read(), batch.images)
            examples = Examples(embeddings, batch.labels)
        key, started = RandomKey(0), time.perf_counter()
        how = task.model.read(), examples, training.learning_rate, key
        local_sgd(task, *how, num_epochs=_TIMED_STEPS)
        return (time.perf_counter() - started) / _TIMED_STEPS

    # In turn, after one time to warm up: others may use the machine meanwhile.
    times = [
        {name: step_s(task) for name, task in tasks.items()} for _ in range(_TIMES)
    ]
    steps = {name: statistics.median(one[name] for one in times[1:]) for name in tasks}
    faster = steps.get("bfloat16", math.inf) < _WORTH_IT * steps["float32"]
    chosen: Precision = "bfloat16" if faster else "float32"
    told = ", ".join(f"{1000 * one:.1f} ms in {name}" for name, one in steps.items())
    # A user is to see it: it decides what the results are.
    log.warning("training.precision is %s here: a step takes %s", chosen, told)
    return replace(experiment, training=replace(training, precision=chosen))
