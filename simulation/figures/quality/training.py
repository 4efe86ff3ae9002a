"""A global model trained centrally, and left at stages of its training."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from knnper.config.document import results_identity
from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples
from server.checkpoint import CheckpointFolder
from simulation.workbench import Workbench
from strategies.core.local_sgd import local_sgd
from strategies.core.mini_batches import steps_per_epoch
from strategies.core.records import ModelState


@dataclass(frozen=True, eq=False)
class CentralTraining:
    """SGD on the images of all clients that take part in training, in one place.

    Its rate does not change; batch size, momentum and augmentation are those of the
    experiment.

    Attributes
    ----------
    bench
        The experiment.
    epochs
        Passes before the model is left, ascending; stage 1 is the first of them.
    folder
        Keeps the weights of the last stages.
    key
        Fixes every random choice.
    """

    bench: Workbench
    epochs: tuple[float, ...]
    folder: Path
    key: RandomKey

    def weights_at(self, stage: int) -> Tensor:
        """Return w after a stage, shape (num_weights,); stages are asked for in order.

        Training goes on from the last stage that was reached, also by a process
        before this one.
        """
        checkpoints = CheckpointFolder(
            self.folder, results_identity(self.bench.experiment)
        )
        latest = checkpoints.load_latest(ModelState)
        reached = 0 if latest is None else latest.server_round
        weights = (
            self.bench.task.initial_weights if latest is None else latest.state.weights
        )
        for number in range(reached + 1, stage + 1):
            weights = self._trained(weights, number)
            checkpoints.save(number, ModelState(weights))
        return weights

    @cached_property
    def examples(self) -> Examples:
        """The training and validation images of the clients that are trained with."""
        parts = [one for one in self.bench.partition.clients if one.seen]
        indices = [one for part in parts for one in (part.train, part.validation)]
        dataset = self.bench.clients.dataset
        return dataset.train.examples_at(np.sort(np.concatenate(indices)))

    def _trained(self, weights: Tensor, stage: int) -> Tensor:
        """Return what a stage makes of the weights of the one before."""
        steps = self._num_steps(stage) - self._num_steps(stage - 1)
        if steps == 0:
            return weights
        task = self.bench.task
        training = replace(task.training, local_epochs=None, local_steps=steps)
        return local_sgd(
            replace(task, training=training),
            weights,
            self.examples,
            training.learning_rate,
            self.key.child("stage", stage),
        ).weights

    def _num_steps(self, stage: int) -> int:
        """Return the steps of SGD that are made until a stage is over."""
        if stage == 0:
            return 0
        size = self.bench.task.training.batch_size
        per_epoch = steps_per_epoch(len(self.examples), size)
        return round(self.epochs[stage - 1] * per_epoch)
