"""Clipping and noise at the clients, for differential privacy.

The change Δ of a client's update from what it was sent is scaled to a norm of at most
S, Δ min(1, S / ‖Δ‖) (McMahan et al. 2018, "Learning Differentially Private Recurrent
Language Models"). With noise at the clients, each of m adds Gaussian noise of standard
deviation σ S / √m to each coordinate, so that their sum has σ S.

The noise is added in floating point: an attacker who can measure the last bits of an
update may learn more than ε allows (Mironov 2012).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, UniformSelection
from knnper.privacy_settings import PrivacySettings
from knnper.seeding import RandomKey
from knnper.strategies.core.mean_update import differences, moved_update
from knnper.strategies.core.method import Method
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.task import Task


def clip_factor(difference: Tensor, clip_norm: float) -> float:
    """Return the factor min(1, S / ‖Δ‖) for a difference (d,).

    The bits of the result do not depend on the number of threads, as those of a BLAS
    would.
    """
    norm = float(np.sqrt(np.square(difference.numpy(), dtype=np.float64).sum()))
    return clip_norm / norm if norm > clip_norm else 1.0


def private_update(
    method: Method,
    payload: Any,
    update: Any,
    clip_norm: float,
    noise: np.random.Generator,
    standard_deviation: float,
) -> Any:
    """Clip the change of an update, and add Gaussian noise to each coordinate.

    An update within ``clip_norm`` is returned unchanged if there is no noise. A clipped
    change is not rounded before the noise: where the weights that were sent are large,
    rounding to float32 could double its norm.
    """
    difference = differences(method, payload, update).double()
    factor = clip_factor(difference, clip_norm)
    if not standard_deviation and factor == 1:
        return update
    difference *= factor
    if standard_deviation:
        values = noise.normal(0.0, standard_deviation, len(difference))
        difference += torch.from_numpy(values)
    return moved_update(method, payload, update, difference)


class PrivateUpdates(UpdateProcessor):
    """Clips the updates of a method and adds the client's share of the noise."""

    settings: PrivacySettings

    @override
    def process(self, payload: Any, update: Any, rng: RandomKey) -> Any:
        deviation, clip_norm = client_deviation(self.settings), self.settings.clip_norm
        noise = self.task.noise_source(rng.child("privacy noise"))
        return private_update(self, payload, update, clip_norm, noise, deviation)


def client_deviation(privacy: PrivacySettings) -> float:
    """Return the standard deviation of the noise that each client adds; 0 for none."""
    if privacy.noise_shares is None:
        return 0.0
    noise = (privacy.noise_multiplier or 0.0) * privacy.clip_norm
    return noise / math.sqrt(privacy.noise_shares)


def private_updates(task: Task, method: Method, privacy: PrivacySettings) -> Method:
    """Wrap a method in the clients' part of a run's section ``privacy``.

    Raises ConfigError if the model has buffers.
    """
    if len(task.model.buffers):
        message = (
            "found a model with running statistics (BatchNorm), expected one without: "
            "noise for weights does not fit them; choose GroupNorm or LayerNorm, or "
            "train the head of a frozen model"
        )
        raise ConfigError([Problem("model.name", message)])
    if privacy.adaptive:
        return method  # the server clips
    return PrivateUpdates(task, method, privacy)


def privacy_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yield conflicts of the section ``privacy`` with itself and with the others."""
    privacy, training = experiment.privacy, experiment.training
    if privacy is None:
        return
    if training.devices is not None or training.selection != UniformSelection():
        yield Problem(
            "training",
            "found devices or a selection by utility with privacy, expected neither: "
            "who counts must not depend on a client's speed or data",
        )
    if privacy.noise_multiplier is None and (
        privacy.noise_shares is not None or privacy.epsilon is None
    ):
        yield Problem(
            "privacy.noise_multiplier",
            "found null with noise_shares or without epsilon, expected a number: only "
            "the server computes the noise, from a budget",
        )
    if not privacy.is_private and (privacy.epsilon or privacy.adaptive):
        yield Problem(
            "privacy.noise_multiplier",
            "found 0 with epsilon or adaptive clipping, which need noise; expected "
            "more, or neither of them",
        )
    mechanisms = ("noise_shares", "adaptive", "correlated")
    chosen = [name for name in mechanisms if getattr(privacy, name)]
    if len(chosen) > 1:
        yield Problem(
            "privacy",
            f"found {' and '.join(chosen)}, expected at most one of them: the server "
            "adapts and correlates noise that it adds itself, and not both at once",
        )
    if privacy.adaptive and training.secure_aggregation is not None:
        yield Problem(
            "privacy.adaptive",
            "found true with secure aggregation, expected false: adaptive clipping "
            "needs a server that sees single updates",
        )
