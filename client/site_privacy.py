"""A site's own clipping and noise on its updates, whatever the server asks for."""

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.errors import RefusedError
from knnper.flat_model import FlatModel
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task

_SEED_BITS = 256


def only_weights(method: Method | type[Method]) -> bool:
    """Return whether the updates of a method hold trained weights alone.

    These differ from the payload, or from parts of it, by what the client has learned.
    Beside them an update has the number of examples and the loss.
    """
    sends_model = method.takes_mean or method.update_type is ModelUpdate
    return sends_model and not method.needs_metrics


def require_no_buffers(model: FlatModel) -> None:
    """Reject a model with running statistics, which noise can make negative."""
    if len(model.buffers):
        raise RefusedError([SafeReason(Code.HAS_BUFFERS)])


class ProtectedUpdates(UpdateProcessor):
    """Clips the difference from the payload and adds Gaussian noise (Local DP).

    The noise is seeded by the operating system: the experiment's seed is known to the
    server, which could subtract the noise.

    Parameters
    ----------
    clip_norm, noise_multiplier
        S and σ; see `SitePrivacySettings`.
    """

    def __init__(
        self, task: Task, method: Method, clip_norm: float, noise_multiplier: float
    ) -> None:
        super().__init__(task, method, NoSettings())
        self._clip_norm = clip_norm
        self._noise_multiplier = noise_multiplier

    @override
    def process(
        self,
        payload: Any,
        update: Any,
        client_state: Any,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        require_no_buffers(self.task.model)
        self.require_origins(payload, update)
        clipped = self._clipped(differences(self.method, payload, update))
        sent = synthetic_update(self.method, payload, update, self._with_noise(clipped))
        return replace(
            sent, num_examples=update.num_examples, train_loss=update.train_loss
        ), None

    def _clipped(self, difference: Tensor) -> Tensor:
        """Shorten a difference (d,) to the norm S."""
        # In float64: the squares of float32 numbers can overflow.
        difference = difference.double()
        norm = float(difference.norm())
        return difference * min(1.0, self._clip_norm / norm) if norm else difference

    def _with_noise(self, clipped: Tensor) -> Tensor:
        """Add noise to a clipped difference (d,), float64; return it as float32."""
        if not self._noise_multiplier:
            return clipped.float()
        generator = np.random.default_rng(secrets.randbits(_SEED_BITS))
        noise = torch.from_numpy(generator.standard_normal(len(clipped)))
        deviation = self._noise_multiplier * self._clip_norm
        return (clipped + deviation * noise).float()
