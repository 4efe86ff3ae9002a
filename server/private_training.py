"""Differentially private rounds: sums of clipped updates with noise, and their ε.

DP-FedAvg (McMahan et al. 2018, Algorithm 1) with a fixed denominator: all clients count
alike, the change Δ_m of each is clipped to S, and a round releases

    (Σ_m Δ_m min(1, S / ‖Δ_m‖) + N(0, σ² S² I)) / (q N)

for N clients that take part with probability q each. The mean goes to the method's
`aggregate` as one update, so its steps are post-processing. Clients that fail are
missing in the sum, and noise and denominator stay: a client that is not there changes
the sum by no more than S, whatever the reason, so ε holds. A round in which too many
fail releases nothing. A round without any client is noise alone.

With adaptive clipping (Andrew et al. 2021, Algorithm 1) S follows the noisy fraction of
updates that were not clipped. Sum and fraction together are one release of multiplier z
if the sum gets z_Δ = (z^-2 - (2 σ_b)^-2)^-1/2: the fraction is counted from -1/2 and
1/2, so that a client changes it by 1/2.

In simulations noise and samples derive from the experiment's seed, so that a run
repeats bit for bit; they measure accuracy and are no protection. With real clients both
come from the operating system, and each release is noted on disk before it is made: a
round that is repeated after a crash counts twice.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from knnper.data.examples import ClientData, Examples, no_examples
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines
from knnper.privacy import (
    NoiseSource,
    Release,
    default_delta,
    epsilon_of,
    noise_multiplier_for,
    seeded_noise,
    system_noise,
)
from knnper.privacy_settings import PrivacySettings
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.correlated_noise import CorrelatedNoise, Noise, coefficients
from knnper.server.federation import Federation
from knnper.server.schedule import num_participants
from knnper.server.selection import ClientSelection, InTurn, Poisson, Uniform
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.method import AS_IT_IS
from knnper.strategies.core.private_updates import length, private_update

# σ_b by default: this fraction of the expected clients of a round (Andrew et al. 2021,
# section 3.1).
_COUNT_NOISE = 0.05
_ROUNDING = 1e-9  # 1 / participation can be a little less than a whole number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivacyPlan:
    """The mechanism of a run, and what it costs.

    Attributes
    ----------
    settings
        Of the section ``privacy``.
    num_expected
        q N, the clients that a round is expected to have; the denominator.
    sampling
        ``poisson``; ``in_turn``; ``uniform`` (of a fixed size, not amplified); or
        ``all``.
    release
        What is accounted for a client that takes part in a round.
    noise_multiplier
        σ: of the sum and, if clipping is adaptive, the count together.
    delta
        δ.
    num_groups
        Groups of clients that take part in turn, with correlated noise; else 1.
    """

    settings: PrivacySettings
    num_expected: float
    sampling: str
    release: Release
    noise_multiplier: float
    delta: float
    num_groups: int = 1

    @classmethod
    def of(
        cls, experiment: Experiment, num_clients: int, num_rounds: int
    ) -> "PrivacyPlan | None":
        """Make the plan of a run with ``num_clients``; None without privacy."""
        privacy, training = experiment.privacy, experiment.training
        if privacy is None:
            return None
        count = num_participants(num_clients, training.participation)
        sampling = "all" if count == num_clients else "uniform"
        num_expected = float(count)
        num_groups, probability = 1, 1.0
        if privacy.correlated and privacy.is_private:
            sampling = "in_turn"
            num_groups = int(1 / training.participation + _ROUNDING)
            num_expected = num_clients / num_groups
        elif (
            privacy.is_private
            and privacy.noise_at == "server"
            and training.participation < 1
            # Its rounds need a fixed number of clients.
            and training.secure_aggregation is None
        ):
            sampling = "poisson"
            probability = training.participation
            num_expected = probability * num_clients
        delta = privacy.delta or default_delta(num_clients)
        multiplier = privacy.noise_multiplier
        if multiplier is None:
            multiplier = noise_multiplier_for(
                privacy.epsilon or math.inf,
                delta,
                sampling=probability,
                count=math.ceil(num_rounds / num_groups),
                accountant=privacy.accountant,
            )
        accounted = multiplier
        if privacy.noise_shares is not None:
            # The fewest clients that may reply, each with its share of the noise.
            num_spare = int(experiment.run.max_failed_fraction * count)
            least = max(1, count - num_spare)
            accounted = multiplier * math.sqrt(least / privacy.noise_shares)
        plan = cls(
            settings=privacy,
            num_expected=num_expected,
            sampling=sampling,
            release=Release(accounted, probability),
            noise_multiplier=multiplier,
            delta=delta,
            num_groups=num_groups,
        )
        if plan.count_noise and 2 * plan.count_noise <= multiplier:
            raise RunError(
                f"privacy.adaptive.count_noise: found {plan.count_noise:g}, expected "
                f"more than {multiplier / 2:.4g}, half the noise multiplier that "
                "follows from privacy.epsilon; leave it out"
            )
        return plan

    def epsilon_after(self, num_releases: int) -> float:
        """Return ε of the first releases; infinite without noise."""
        return epsilon_of(
            [replace(self.release, count=math.ceil(num_releases / self.num_groups))],
            self.delta,
            self.settings.accountant,
        )

    @property
    def count_noise(self) -> float:
        """σ_b, the noise on the number of unclipped updates; 0 without noise."""
        adaptive = self.settings.adaptive
        if adaptive is None or not self.settings.is_private:
            return 0.0
        default = max(_COUNT_NOISE * self.num_expected, self.noise_multiplier)
        return adaptive.count_noise or default

    @property
    def sum_noise(self) -> float:
        """The noise that the server adds to a sum, as a multiple of the clip norm."""
        if self.settings.noise_at == "clients":
            return 0.0
        if self.num_groups > 1:
            length_of_column = np.linalg.norm(coefficients(self.num_groups))
            return self.noise_multiplier * float(length_of_column)
        if not self.count_noise:
            return self.noise_multiplier
        z, of_count = self.noise_multiplier, 2 * self.count_noise
        return float((z**-2 - of_count**-2) ** -0.5)

    def as_document(self) -> dict[str, Any]:
        """Return plain values for manifest and results."""
        return {
            "unit": "client",
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.settings.clip_norm,
            "accountant": self.settings.accountant,
            "noise_at": self.settings.noise_at,
            "sampling": self.sampling,
            "sampling_probability": self.release.sampling,
        }


class PrivateTraining:
    """The private rounds of one run.

    Parameters
    ----------
    releases
        File of the releases to real clients so far; None in simulations, where a
        repeated round releases the same numbers once more.
    """

    def __init__(
        self, assembly: Assembly, plan: PrivacyPlan, releases: JsonLines | None
    ) -> None:
        self.plan = plan
        self.method, self.task = assembly.method, assembly.task
        self.key = assembly.key
        self.noise_source: NoiseSource = seeded_noise
        self._releases = releases
        self._correlated = CorrelatedNoise(plan.num_groups)
        self._num_noted = 0
        if releases is not None:
            self.noise_source = system_noise
            self._num_noted = len(releases.read())

    @property
    def is_noisy(self) -> bool:
        """Whether rounds are aggregated with noise."""
        return self.plan.settings.is_private

    @property
    def clips_sum(self) -> bool:
        """Whether the server clips what it adds up: not what has noise already."""
        return self.is_noisy and self.plan.settings.noise_at == "server"

    def selection(self) -> ClientSelection:
        """Return how the clients of a round are sampled."""
        if self.plan.sampling == "poisson":
            probability = self.plan.release.sampling
            return Poisson(self.key, probability, self.noise_source)
        if self.plan.sampling == "in_turn":
            return InTurn(self.key, self.plan.num_groups, self._num_before)
        return Uniform(self.key)

    def allows(self, server_round: int) -> bool:
        """Return whether a round stays within the budget; reject one without rounds."""
        most = self.plan.settings.epsilon
        if most is None or not self.is_noisy:
            return True
        num_before = self._num_before(server_round)
        epsilon = self.plan.epsilon_after(num_before + 1)
        if epsilon > most and not num_before:
            raise RunError(
                f"privacy.epsilon: found {most:g}, expected at least {epsilon:.4g}, "
                "which the first round spends; raise it or privacy.noise_multiplier"
            )
        if epsilon > most:
            log.warning(
                "the training ends before round %d, with which it would spend epsilon "
                "%.4g, more than privacy.epsilon %g",
                server_round,
                epsilon,
                most,
            )
        return epsilon <= most

    def begin(
        self, payload: Any, server_round: int, clip_norm: float | None
    ) -> "PrivateRound":
        """Begin a round, or another attempt at it.

        ``clip_norm``: after adaptation; None in the first round.
        """
        clip_norm = clip_norm or self.plan.settings.clip_norm
        return PrivateRound(self, payload, server_round, clip_norm)

    def note_release(self, server_round: int) -> None:
        """Add a release to the file of a run with real clients."""
        if self._releases is not None:
            release = self.plan.release
            self._releases.append(
                {
                    "server_round": server_round,
                    "noise_multiplier": release.noise_multiplier,
                    "sampling": release.sampling,
                }
            )
            self._num_noted += 1

    def correlated_noise(self, server_round: int, deviation: float, size: int) -> Noise:
        """Return the noise of a round's sum, (size,), where clients take turns.

        ``deviation``: of the independent noise that it is made of.
        """
        number = self._num_before(server_round + 1)

        def independent(number: int) -> Noise:
            key = self.key.child("privacy noise", number)
            return self.noise_source(key).normal(0.0, deviation, size)

        is_simulation = self._releases is None
        return self._correlated.row(number, independent, replay=is_simulation)

    def figures(self, server_round: int, clip_norm: float) -> dict[str, float]:
        """Return the figures of a round's record."""
        figures = {}
        if self.is_noisy:
            num_releases = self._num_before(server_round + 1)
            figures["epsilon"] = self.plan.epsilon_after(num_releases)
            figures["num_releases"] = num_releases
        if self.plan.settings.adaptive is not None:
            figures["clip_norm"] = clip_norm
        return figures

    def _num_before(self, server_round: int) -> int:
        """Return the number of releases before a round."""
        # Not fewer than the checkpoints show, should the file be lost.
        return max(self._num_noted, server_round - 1)


def private_training(
    assembly: Assembly,
    num_clients: int,
    federation: Federation,
    checkpoints: CheckpointFolder,
) -> PrivateTraining | None:
    """Make the private training of a run's ``num_clients``; None without privacy."""
    num_rounds = assembly.method.num_rounds
    plan = PrivacyPlan.of(assembly.experiment, num_clients, num_rounds)
    if plan is None:
        return None
    releases = None if federation.trusts_clients else checkpoints.releases
    return PrivateTraining(assembly, plan, releases)


@dataclass
class PrivateRound:
    """The sum of one round.

    Attributes
    ----------
    payload
        What the clients were sent.
    clip_norm
        S of this round.
    """

    training: PrivateTraining
    payload: Any
    server_round: int
    clip_norm: float
    _sum: torch.Tensor | None = field(default=None, init=False)
    _template: Any = field(default=None, init=False)
    # Σ (b - 1/2), with b = 1 for an update that was not clipped.
    _num_unclipped: float = field(default=0.0, init=False)
    _count_noise: float = field(default=0.0, init=False)
    _is_noted: bool = field(default=False, init=False)

    def note(self) -> None:
        """Note a noisy release on disk, once, before anything of it is known."""
        if self.training.is_noisy and not self._is_noted:
            self.training.note_release(self.server_round)
            self._is_noted = True

    def alike(self, updates: Updates[Any], weight: int) -> Iterator[tuple[str, Any]]:
        """Yield the updates of a round without noise: clipped, all with one weight."""
        method = self.training.method
        for client, update in updates:
            short = private_update(method, self.payload, update, self.clip_norm)
            self._num_unclipped += 0.5 if short is update else -0.5
            yield client, replace(short, num_examples=weight)

    def add_all(self, updates: Updates[Any]) -> None:
        """Add up the clipped changes of all updates."""
        for _, update in updates:
            change = differences(self.training.method, self.payload, update)
            norm = length(change) if self.training.clips_sum else 0.0
            is_clipped = norm > self.clip_norm
            self._num_unclipped += 0.5 - is_clipped
            if self._sum is None:
                self._sum = torch.zeros(len(change), dtype=torch.float64)
                self._template = update
            factor = self.clip_norm / norm if is_clipped else 1.0
            self._sum.add_(change, alpha=factor)

    def multiply(self, count: int) -> None:
        """Make a sum of the mean of ``count`` updates, which has been added."""
        if self._sum is not None:
            self._sum.mul_(count)

    def release(self, state: Any) -> Any:
        """Add the noise to the sum, and return the server's state after the round."""
        training, plan = self.training, self.training.plan
        self.note()
        key = training.key.child("privacy noise", self.server_round)
        generator = training.noise_source(key)
        template = self._template
        if template is None:
            template = self._blank_update()
        total = self._sum
        if total is None:
            change = differences(training.method, self.payload, template)
            total = torch.zeros(len(change), dtype=torch.float64)
        deviation, size = plan.sum_noise * self.clip_norm, len(total)
        if plan.num_groups > 1:
            noise = training.correlated_noise(self.server_round, deviation, size)
        else:
            noise = generator.normal(0.0, deviation, size)
        self._count_noise = float(generator.normal(0.0, plan.count_noise))
        mean = (total + torch.from_numpy(noise)) / plan.num_expected
        update = synthetic_update(training.method, self.payload, template, mean)
        return training.method.aggregate(state, iter([("", update)]))

    def next_clip_norm(self) -> float | None:
        """Return the clip norm of the next round; None unless it is adaptive."""
        plan = self.training.plan
        adaptive = plan.settings.adaptive
        if adaptive is None:
            return None
        noisy_count = self._num_unclipped + self._count_noise
        fraction = noisy_count / plan.num_expected + 0.5
        step = adaptive.learning_rate * (fraction - adaptive.quantile)
        return self.clip_norm * math.exp(-step)

    def _blank_update(self) -> Any:
        """Return an update for its shapes alone, trained on one blank example.

        Used where no client was sampled.
        """
        training = self.training
        spec = training.task.spec
        blank = Examples(
            torch.zeros((1, *spec.image_shape), dtype=spec.torch_dtype),
            torch.zeros(1, dtype=torch.int64),
        )
        data = ClientData(blank, no_examples(spec))
        key = training.key.child("blank update")
        sent = training.method.client_update(self.payload, None, data, 1, key)[1]
        decoded = training.method.decoded
        return sent if decoded is None else decoded(self.payload, sent)


def privacy_summary(
    experiment: Experiment, plan: PrivacyPlan, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Make the entry ``training.privacy`` of ``results.json``."""
    last = rounds[-1] if rounds else {}
    epsilon = last.get("epsilon", 0.0 if plan.settings.is_private else None)
    return {
        "epsilon": epsilon,
        **plan.as_document(),
        "clip_norm": last.get("clip_norm", plan.settings.clip_norm),
        "num_releases": last.get("num_releases", 0),
        "also_released": also_released(experiment, plan),
    }


def also_released(experiment: Experiment, plan: PrivacyPlan) -> list[str]:
    """List what leaves clients beside the sums, which ε does not cover."""
    released = ["the update of each client in each round, to the server"]
    if plan.settings.noise_at == "clients":
        released = ["the update of each client with its share of the noise alone"]
    if experiment.training.secure_aggregation is not None:
        released = []
        if plan.sum_noise:
            released = ["the sum of the clients' updates in each round, to the server"]
    released += [
        "the number of clients that train",
        "number of examples and train loss of each client, to the server",
        "which clients take part and which fail, to the server",
        "mean train loss of each round, and whether the training explodes",
        "test metrics of each client and their summaries",
    ]
    if experiment.run.validate_every:
        released.append("validation accuracy over the clients")
    if experiment.personalization.name != AS_IT_IS:
        released.append("settings that each client chooses for itself, such as λ and k")
    return released
