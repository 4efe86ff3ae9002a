"""Select the clients of a round.

By utility as in Oort (Lai et al., "Oort: Efficient Federated Learning via Guided
Participant Selection", OSDI 2021, Algorithm 1): part of a round are clients with a high
utility per second, and the rest is sampled uniformly. Departures: the rest is sampled
from all other clients, not only from those that never took part, so that
``exploration: 1`` is uniform selection; the preferred duration is a fixed quantile, not
adjusted in the course of the run; no client is left out after many rounds. Utilities
are divided by their 95 % quantile; the authors' code takes the least one away and
divides by the range, so that the client of least utility has its staleness alone. The
first round has the whole ``exploration``, and later ones no less than
``min_exploration``; in the code the first decay comes before the first round, and
exploration ends when all clients have taken part. The cut-off is the paper's 95 %,
where the code has 70 %.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from knnper.experiment import (
    TrainingSettings,
    UtilitySelection,
)
from knnper.privacy import NoiseSource, seeded_noise
from knnper.seeding import RandomKey

CUTOFF = (
    0.95  # c: part of the last sufficient utility from which clients may be sampled
)
CLIPPED_AT = 0.95  # quantile at which utilities are capped


def draw(
    clients: Sequence[str], count: int, server_round: int, key: RandomKey
) -> list[str]:
    """Sample clients uniformly without replacement; return them sorted by name."""
    generator = key.child("participants", server_round).numpy()
    chosen = generator.choice(len(clients), size=count, replace=False)
    return sorted(clients[position] for position in chosen)


class ClientSelection(ABC):
    """Selects the clients of a round."""

    @abstractmethod
    def draw(self, clients: Sequence[str], count: int, server_round: int) -> list[str]:
        """Select ``count`` of the available clients, sorted."""

    def learn(self, gains: Sequence[Mapping[str, float]]) -> None:  # noqa: B027
        """Note the statistical utilities of clients in each round so far."""


@dataclass(frozen=True)
class Uniform(ClientSelection):
    """Selects each client with the same probability."""

    key: RandomKey

    @override
    def draw(self, clients: Sequence[str], count: int, server_round: int) -> list[str]:
        return draw(clients, count, server_round, self.key)


@dataclass(frozen=True)
class Poisson(ClientSelection):
    """Selects each client with the same probability, independently of all others.

    So a round may have any number of clients, also none; ``count`` is not used.
    """

    key: RandomKey
    probability: float
    noise_source: NoiseSource = seeded_noise

    @override
    def draw(self, clients: Sequence[str], count: int, server_round: int) -> list[str]:
        generator = self.noise_source(self.key.child("participants", server_round))
        is_drawn = generator.random(len(clients)) < self.probability
        return sorted(itertools.compress(clients, is_drawn))


@dataclass(frozen=True)
class InTurn(ClientSelection):
    """Selects groups of clients in turn, so that each takes part once in a cycle.

    Attributes
    ----------
    num_groups
        Length of a cycle.
    turn_of
        ``(server_round) -> turn``, from 0: the groups of other turns than one in
        ``num_groups`` have no client in common.
    """

    key: RandomKey
    num_groups: int
    turn_of: Callable[[int], int]

    @override
    def draw(self, clients: Sequence[str], count: int, server_round: int) -> list[str]:
        order = self.key.child("turns").numpy().permutation(len(clients))
        first = self.turn_of(server_round) % self.num_groups
        return sorted(clients[place] for place in order[first :: self.num_groups])


@dataclass
class ByUtility(ClientSelection):
    """Selects clients with a probability that grows with their utility.

    Each round is sampled from the utilities of the rounds before it, whatever is known
    already, so that a resumed run makes the same choices.

    Attributes
    ----------
    durations
        Seconds that a round takes each client; empty without a clock.
    """

    settings: UtilitySelection
    key: RandomKey
    durations: Mapping[str, float] = field(default_factory=dict)
    _gains: Sequence[Mapping[str, float]] = ()
    _num_counted: int = 0  # number of rounds that are in `_latest`
    _latest: dict[str, tuple[float, int]] = field(default_factory=dict)

    @override
    def learn(self, gains: Sequence[Mapping[str, float]]) -> None:
        self._gains = gains

    @override
    def draw(self, clients: Sequence[str], count: int, server_round: int) -> list[str]:
        for earlier in range(self._num_counted + 1, server_round):
            for client, gain in self._gains[earlier - 1].items():
                self._latest[client] = (gain, earlier)
        self._num_counted = server_round - 1
        num_explored = int(self.exploration(server_round) * count + 0.5)
        utilities = self.utilities(clients, server_round)
        num_exploited = min(len(utilities), count - num_explored)
        exploited = self._exploited(utilities, num_exploited, server_round)
        chosen = set(exploited)
        others = [client for client in clients if client not in chosen]
        explored = draw(others, count - num_exploited, server_round, self.key)
        return sorted([*exploited, *explored])

    def exploration(self, server_round: int) -> float:
        """Return ε, the part of a round that is sampled uniformly."""
        settings = self.settings
        decayed = settings.exploration * settings.exploration_decay ** (
            server_round - 1
        )
        return float(min(settings.exploration, max(settings.min_exploration, decayed)))

    def utilities(
        self, clients: Sequence[str], server_round: int
    ) -> Mapping[str, float]:
        """Return the utility of each client that took part before round R.

        (min(U, U_95) / U_95 + sqrt(b ln R / L)) (T / t)^α, the factor where t > T, with
        U of `gain`, its 95 % quantile U_95, the round L in which it took part last, its
        seconds t and the preferred seconds T.
        """
        known = {
            client: self._latest[client] for client in clients if client in self._latest
        }
        if not known:
            return {}
        most = float(np.quantile([gain for gain, _ in known.values()], CLIPPED_AT))
        bonus = self.settings.staleness_weight * math.log(server_round)
        return {
            client: (
                (min(gain, most) / most if most > 0 else 0.0)
                + math.sqrt(bonus / last_round)
            )
            * self._haste(client)
            for client, (gain, last_round) in known.items()
        }

    @functools.cached_property
    def _preferred_s(self) -> float:
        seconds = [*self.durations.values()]
        return float(np.quantile(seconds, self.settings.preferred_quantile))

    def _haste(self, client: str) -> float:
        """Return the factor on the utility of a slow client."""
        if not self.durations:
            return 1.0
        ratio = min(1.0, self._preferred_s / self.durations[client])
        return float(ratio**self.settings.straggler_exponent)

    def _exploited(
        self, utilities: Mapping[str, float], count: int, server_round: int
    ) -> list[str]:
        """Sample clients by utility among those with nearly the largest."""
        if not count:
            return []
        least = CUTOFF * sorted(utilities.values(), reverse=True)[count - 1]
        pool = sorted(client for client in utilities if utilities[client] >= least)
        weights = np.array([utilities[client] for client in pool])
        shares = weights / weights.sum() if least > 0 else None
        generator = self.key.child("participants by utility", server_round).numpy()
        chosen = generator.choice(len(pool), size=count, replace=False, p=shares)
        return [pool[position] for position in chosen]


def gain(num_examples: int, train_loss: float) -> float:
    """Return U = |B| L, a client's statistical utility.

    Oort's |B| sqrt(mean of the squared losses), with the mean loss L for each example
    of B, since a client reports only the mean.
    """
    return num_examples * max(0.0, train_loss) if math.isfinite(train_loss) else 0.0


def selection_of(
    training: TrainingSettings,
    key: RandomKey,
    durations: Callable[[], Mapping[str, float]] = dict,
) -> ClientSelection:
    """Make the selection of a training."""
    if isinstance(training.selection, UtilitySelection):
        return ByUtility(training.selection, key, durations())
    return Uniform(key)
