"""A site's own clipping and noise on its updates, whatever the server asks for."""

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from knnper.client.settings import SitePrivacySettings
from knnper.errors import RefusedError
from knnper.flat_model import FlatModel
from knnper.privacy import system_noise
from knnper.privacy_settings import PrivacySettings
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.private_updates import (
    PrivateUpdates,
    client_deviation,
    private_update,
)
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class Protection:
    """S and σ of a site's updates; see `SitePrivacySettings`."""

    clip_norm: float
    noise_multiplier: float

    @classmethod
    def of(
        cls, site: SitePrivacySettings | None, run: PrivacySettings | None
    ) -> "Protection | None":
        """Return the smaller S and the larger noise of a site and a run.

        None without clipping at the site.
        """
        if site is None or site.clip_norm is None:
            return None
        clip_norm, least_deviation = site.clip_norm, 0.0
        if run is not None:
            least_deviation = client_deviation(run)
            # An adaptive norm is applied by the server.
            if run.adaptive is None:
                clip_norm = min(clip_norm, run.clip_norm)
        least = least_deviation / clip_norm
        return cls(clip_norm, max(site.noise_multiplier, least))


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
    """Clips the change of an update, adds noise to it, and hides its weight.

    The noise is seeded by the operating system: the experiment's seed is known to the
    server, which could subtract the noise.

    Parameters
    ----------
    protection
        None adds no noise and clips nothing.
    weight
        Replaces the number of examples; None leaves it.
    """

    def __init__(
        self,
        task: Task,
        method: Method,
        protection: Protection | None,
        weight: int | None,
    ) -> None:
        # The run's norm and noise are part of the protection.
        if protection is not None and isinstance(method, PrivateUpdates):
            method = method.method
        super().__init__(task, method, NoSettings())
        self._protection = protection
        self._weight = weight

    @override
    def process(self, payload: Any, update: Any, rng: RandomKey) -> Any:
        if self._weight is not None:
            update = replace(update, num_examples=self._weight)
        if self._protection is None:
            return update
        require_no_buffers(self.task.model)
        self.require_origins(payload, update)
        clip_norm = self._protection.clip_norm
        deviation = self._protection.noise_multiplier * clip_norm
        noise = system_noise(rng) if deviation else None
        return private_update(self, payload, update, clip_norm, noise, deviation)
