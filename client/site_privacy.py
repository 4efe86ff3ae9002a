"""A site's own clipping and noise on its updates, whatever the server asks for."""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from knnper.client.settings import SitePrivacySettings
from knnper.errors import RefusedError
from knnper.flat_model import FlatModel
from knnper.privacy import system_noise
from knnper.privacy_settings import PrivacySettings
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method
from knnper.strategies.core.private_updates import (
    PrivateUpdates,
    client_deviation,
    private_update,
)
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task


def applied_privacy(
    site: SitePrivacySettings, run: PrivacySettings | None
) -> SitePrivacySettings:
    """Return a site's settings with the smaller S and the larger noise of both."""
    if site.clip_norm is None or run is None:
        return site
    clip_norm = site.clip_norm
    # An adaptive norm is applied by the server.
    if not run.adaptive:
        clip_norm = min(clip_norm, run.clip_norm)
    least = client_deviation(run) / clip_norm
    noise_multiplier = max(site.noise, least)
    return replace(site, clip_norm=clip_norm, noise_multiplier=noise_multiplier)


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

    Its settings have the S and σ that apply; a null norm clips nothing. The noise is
    seeded by the operating system: the experiment's seed is known to the server, which
    could subtract the noise.
    """

    settings: SitePrivacySettings

    @override
    def process(self, payload: Any, update: Any, rng: RandomKey) -> Any:
        privacy = self.settings
        if privacy.fixed_weight is not None:
            update = replace(update, num_examples=privacy.fixed_weight)
        clip_norm = privacy.clip_norm
        if clip_norm is None:
            return update
        require_no_buffers(self.task.model)
        self.require_origins(payload, update)
        deviation = privacy.noise * clip_norm
        noise = system_noise(rng)
        return private_update(self, payload, update, clip_norm, noise, deviation)


def protected_updates(
    task: Task,
    site: SitePrivacySettings | None,
    run: PrivacySettings | None,
    method: Method,
) -> Method:
    """Wrap a method in the clipping, noise and weight of a site, if it has any."""
    if site is None:
        return method
    # The run's norm and noise are part of the site's.
    if site.clip_norm is not None and isinstance(method, PrivateUpdates):
        method = method.method
    return ProtectedUpdates(task, method, applied_privacy(site, run))
