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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from knnper.data.examples import ClientData, Examples, blank_input
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines
from knnper.privacy import (
    Release,
    default_delta,
    epsilon_of,
    noise_multiplier_for,
    seeded_noise,
    system_noise,
)
from knnper.server.correlated_noise import CorrelatedNoise, Noise, coefficients
from knnper.server.schedule import num_participants
from knnper.server.selection import ClientSelection, InTurn, Poisson, Uniform
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.private_updates import clip_factor

# σ_b: this fraction of the expected clients of a round (Andrew et al. 2021, section
# 3.1).
_COUNT_NOISE = 0.05
_QUANTILE = 0.5  # γ, the fraction of updates that should not be clipped
_CLIP_RATE = 0.2  # η_C, the learning rate of the clip norm
_LARGE_DELTA = 1e-3  # the probability that differential privacy allows to fail
_ROUNDING = 1e-9  # 1 / participation can be a little less than a whole number

log = logging.getLogger(__name__)


class PrivateTraining:
    """The mechanism of a run with noise in its section ``privacy``, and what it costs.

    Parameters
    ----------
    num_clients
        Clients that can train.
    releases
        File of the releases to real clients so far; None in simulations, where a
        repeated round releases the same numbers once more.

    Attributes
    ----------
    num_expected
        q N, the clients that a round is expected to have; the denominator.
    selection
        How the clients of a round are sampled.
    release
        What is accounted for a client that takes part in a round.
    noise_multiplier
        σ: of the sum and, if clipping is adaptive, the count together.
    delta
        δ.
    num_groups
        Groups of clients that take part in turn, with correlated noise; else 1.
    """

    def __init__(
        self, assembly: Assembly, num_clients: int, releases: JsonLines | None = None
    ) -> None:
        self.experiment = experiment = assembly.experiment
        self.method, self.key = assembly.method, assembly.key
        privacy, training = experiment.privacy, experiment.training
        assert privacy is not None
        self.settings = privacy
        # 1. The releases so far.
        self.noise_source = seeded_noise if releases is None else system_noise
        self._releases = releases
        self._num_noted = 0 if releases is None else len(releases.read())
        # 2. The clients of a round.
        self.selection: ClientSelection = Uniform(self.key)
        count = num_participants(num_clients, training.participation)
        self.num_expected = float(count)
        self.num_groups, probability = 1, 1.0
        if privacy.correlated:
            self.num_groups = int(1 / training.participation + _ROUNDING)
            self.num_expected = num_clients / self.num_groups
            self.selection = InTurn(self.key, self.num_groups, self._num_before)
        # Rounds of secure aggregation need a fixed number of clients.
        elif privacy.noise_shares is None and training.secure_aggregation is None:
            probability = training.participation
            self.num_expected = probability * num_clients
            self.selection = Poisson(self.key, probability, self.noise_source)
        self._correlated = CorrelatedNoise(self.num_groups, self._num_noted)
        # 3. The noise.
        self.delta = privacy.delta or default_delta(num_clients)
        multiplier = privacy.noise_multiplier
        if multiplier is None:
            multiplier = noise_multiplier_for(
                privacy.epsilon or math.inf,
                self.delta,
                sampling=probability,
                count=math.ceil(self.method.num_rounds / self.num_groups),
                accountant=privacy.accountant,
            )
        self.noise_multiplier = accounted = multiplier
        if privacy.noise_shares is not None:
            # The fewest clients that may reply, each with its share of the noise.
            num_spare = int(experiment.run.max_failed_fraction * count)
            least = max(1, count - num_spare)
            accounted = multiplier * math.sqrt(least / privacy.noise_shares)
        self.release = Release(accounted, probability)

    @property
    def count_noise(self) -> float:
        """σ_b, the noise on the number of unclipped updates; 0 if it is not used."""
        if not self.settings.adaptive:
            return 0.0
        # Above half the multiplier, so that the noise of the sum stays finite.
        return max(_COUNT_NOISE * self.num_expected, self.noise_multiplier)

    @property
    def sum_noise(self) -> float:
        """The noise that the server adds to a sum, as a multiple of the clip norm."""
        if self.settings.noise_shares is not None:
            return 0.0
        if self.count_noise:
            z, of_count = self.noise_multiplier, 2 * self.count_noise
            return float((z**-2 - of_count**-2) ** -0.5)
        length_of_column = np.linalg.norm(coefficients(self.num_groups))
        return self.noise_multiplier * float(length_of_column)

    def epsilon_after(self, num_releases: int, delta: float | None = None) -> float:
        """Return ε of the first releases, at δ of the run or another; may be inf."""
        count = math.ceil(num_releases / self.num_groups)
        releases = [replace(self.release, count=count)]
        return epsilon_of(releases, delta or self.delta, self.settings.accountant)

    def allows(self, server_round: int) -> bool:
        """Return whether a round stays within the budget; reject one without rounds."""
        most, num_before = self.settings.epsilon, self._num_before(server_round)
        epsilon = self.epsilon_after(num_before + 1)
        if most is None or epsilon <= most:
            return True
        problem = (
            f"privacy.epsilon: found {most:g}, expected at least {epsilon:.4g} for "
            f"round {server_round}"
        )
        if not num_before:
            raise RunError(f"{problem}; raise it or privacy.noise_multiplier")
        log.warning("the training ends at its budget: %s", problem)
        return False

    def note_release(self, server_round: int) -> None:
        """Add a release to the file of a run with real clients."""
        if self._releases is not None:
            self._releases.append({"server_round": server_round})
            self._num_noted += 1

    def correlated_noise(self, server_round: int, deviation: float, size: int) -> Noise:
        """Return the noise of a round's sum, (size,), where clients take turns.

        ``deviation``: of the independent noise that it is made of.
        """
        number = self._num_before(server_round + 1)

        def independent(number: int) -> Noise:
            key = self.key.child("privacy noise", number)
            return self.noise_source(key).normal(0.0, deviation, size)

        return self._correlated.row(number, independent)

    def figures(self, server_round: int, clip_norm: float | None) -> dict[str, float]:
        """Return the figures of a round's record; ``clip_norm``: if it was adapted."""
        num_releases = self._num_before(server_round + 1)
        figures = {
            "epsilon": self.epsilon_after(num_releases),
            "delta": self.delta,
            "num_releases": num_releases,
        }
        if self.settings.adaptive:
            figures["clip_norm"] = clip_norm or self.settings.clip_norm
        return figures

    def plan(self) -> dict[str, Any]:
        """Return plain values for the manifest, with the ε that the run may spend.

        Warns of a large δ, with which ε means little.
        """
        if self.delta > _LARGE_DELTA:
            log.warning(
                "delta is %.2g, too large for epsilon to mean much; set "
                "privacy.delta, such as 1e-5",
                self.delta,
            )
        epsilon = self.epsilon_after(self.method.num_rounds)
        return {
            "unit": "client",
            "epsilon": min(epsilon, self.settings.epsilon or epsilon),
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.release.sampling,
            "also_released": _also_released(self.experiment),
        }

    def _num_before(self, server_round: int) -> int:
        """Return the number of releases before a round."""
        # Not fewer than the checkpoints show, should the file be lost.
        return max(self._num_noted, server_round - 1)


@dataclass
class PrivateRound:
    """One attempt at a round: its clipped updates, and what is released of them.

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
    # Σ (b - 1/2), with b = 1 for an update that was not clipped; in the end with noise.
    _num_unclipped: float = field(default=0.0, init=False)
    _is_noted: bool = field(default=False, init=False)

    def note(self) -> None:
        """Note a release on disk, once, before anything of it is known."""
        if not self._is_noted:
            self.training.note_release(self.server_round)
            self._is_noted = True

    def noisy_mean(
        self,
        updates: Updates[Any],
        require_enough: Callable[[], None] = lambda: None,
        masked: Sequence[str] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield one update for all: the mean of their clipped changes with noise.

        Parameters
        ----------
        require_enough
            Called before the release; raises if too many clients failed.
        masked
            With secure aggregation, where the only update is the mean of several
            clients: their names, known once the update is.
        """
        training, method = self.training, self.training.method
        total: torch.Tensor | None = None
        template: Any = None
        for _, update in updates:
            change = differences(method, self.payload, update)
            # The server does not clip what has noise already.
            factor = clip_factor(change, self.clip_norm) if training.sum_noise else 1.0
            self._num_unclipped += 0.5 - (factor < 1)
            if total is None:
                total = torch.zeros(len(change), dtype=torch.float64)
                template = update
            total.add_(change, alpha=factor)
        require_enough()
        if total is None:
            template = self._blank_update()
            change = differences(method, self.payload, template)
            total = torch.zeros(len(change), dtype=torch.float64)
        elif masked is not None:
            total.mul_(len(masked))
        self.note()
        key = training.key.child("privacy noise", self.server_round)
        generator = training.noise_source(key)
        deviation, size = training.sum_noise * self.clip_norm, len(total)
        if training.num_groups > 1:
            noise = training.correlated_noise(self.server_round, deviation, size)
        else:
            noise = generator.normal(0.0, deviation, size)
        self._num_unclipped += float(generator.normal(0.0, training.count_noise))
        mean = (total + torch.from_numpy(noise)) / training.num_expected
        yield "", synthetic_update(method, self.payload, template, mean)

    def next_clip_norm(self) -> float | None:
        """Return the clip norm of the next round; None unless it is adaptive."""
        if not self.training.settings.adaptive:
            return None
        fraction = self._num_unclipped / self.training.num_expected + 0.5
        return self.clip_norm * math.exp(-_CLIP_RATE * (fraction - _QUANTILE))

    def _blank_update(self) -> Any:
        """Return an update for its shapes alone, trained on one blank example.

        Used where no client was sampled.
        """
        method = self.training.method
        blank = Examples(blank_input(method.task.spec), torch.zeros(1).long())
        data = ClientData(blank, blank)
        key = self.training.key.child("blank update")
        sent = method.client_update(self.payload, None, data, 1, key)[1]
        return sent if method.decoded is None else method.decoded(self.payload, sent)


def _also_released(experiment: Experiment) -> list[str]:
    """List what leaves clients beside the sums, which ε does not cover."""
    assert experiment.privacy is not None
    released = []
    if experiment.training.secure_aggregation is None:
        released.append("the update of each client in each round, to the server")
    elif experiment.privacy.noise_shares is None:
        released.append("the sum of the clients' updates in each round, to the server")
    return [
        *released,
        "the number of clients that train",
        "number of examples and train loss of each client, to the server",
        "which clients take part and which fail, to the server",
        "mean train loss of each round, and whether the training explodes",
        "test metrics of each client and their summaries",
        "validation accuracies over the clients, with run.validate_every",
        "settings that a personalisation chooses at its client, such as λ and k",
    ]
