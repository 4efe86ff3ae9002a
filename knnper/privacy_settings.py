"""The settings of an experiment's privacy: of clients, of examples, and of sums.

The sections ``privacy``, ``training.example_privacy`` and
``training.secure_aggregation``.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from knnper.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
)


@dataclass(frozen=True)
class PrivacySettings(Settings):
    """Differential privacy of the trained model, for each client as a whole.

    Two runs are neighbours if one has one client more. The update of a client is
    clipped to a norm of at most S, all clients count alike, and the sum of a round gets
    Gaussian noise of standard deviation σ S in each coordinate.

    Attributes
    ----------
    clip_norm
        S, the largest norm of a client's update, or with ``adaptive`` that of the first
        round. Useful: about the median norm of an update without privacy.
    noise_multiplier
        σ. Null: the smallest with which all rounds stay within ``epsilon``. 0: no noise
        and no privacy; clients are sampled as without this section.
    epsilon
        The run stops before the round that would exceed it. Null: no limit.
    delta
        δ, below 1 / n for n clients. Null: n^-1.1, with n the seen clients that train.
    accountant
        ``pld``, privacy loss distributions, or ``rdp``, Rényi differential privacy,
        which is faster for very many rounds and gives a larger ε.
    noise_shares
        Null: the server adds the noise, and clients are sampled independently of each
        other (Poisson sampling), which amplifies privacy. Otherwise the number of
        clients of a round: each adds a share of the noise, for a server that sees sums
        only, and together the shares have σ S. Then nothing is amplified, and ε holds
        for a round in which as many fail as ``run.max_failed_fraction`` allows.
    adaptive
        Whether the clip norm follows the median norm (Andrew et al. 2021, with their
        γ = 0.5 and η_C = 0.2). The noise on the number of updates that were not clipped
        has the standard deviation σ_b = m / 20 for m expected clients of a round, or σ
        if that is larger.
    correlated
        Whether the noise of a round partly cancels that of the rounds before (DP-FTRL),
        and clients take part in turn, once in 1 / ``participation`` rounds, rounded
        down. For runs in which who takes part is no secret, as it must be for sampling
        to amplify privacy.
    """

    clip_norm: PositiveFloat
    noise_multiplier: NonNegativeFloat | None = None
    epsilon: PositiveFloat | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    accountant: Literal["pld", "rdp"] = "pld"
    noise_shares: PositiveInt | None = None
    adaptive: bool = False
    correlated: bool = False

    @property
    def is_private(self) -> bool:
        """Whether there is noise."""
        return self.noise_multiplier != 0


@dataclass(frozen=True)
class ExamplePrivacySettings(Settings):
    """Differential privacy of each training example at its client (DP-SGD).

    Mini-batches are sampled independently of each other (Poisson sampling), the
    gradient of each example is clipped, and their sum gets Gaussian noise. The server
    learns no train loss.

    Attributes
    ----------
    clip_norm
        C, the largest norm of the gradient of one example; useful from 0.1 to 10, about
        the median of these norms.
    noise_multiplier
        σ: the noise on the sum of a mini-batch has the standard deviation σ C in each
        coordinate; useful from 0.5 to 2. 0 is no noise, and no privacy.
    delta
        δ, below 1 / n for a client's n training examples. Null: n^-1.1 at each client.
    """

    clip_norm: PositiveFloat
    noise_multiplier: NonNegativeFloat
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(frozen=True)
class SecAggPlusSettings(Settings):
    """SecAgg+ (Bell et al. 2020): clients may drop out at any time.

    Attributes
    ----------
    neighbors
        k, the clients with which each client shares its secrets; all others of a
        smaller round. Useful: 20 to 100; time and bytes grow with it.
    threshold
        The fraction of each group (a client and its neighbours) that must stay to the
        end of a round, above 0.5. This many members of a group, together with the
        server, can read the client's update.
    clip_range
        Each number of an update is clipped to plus or minus this.
    bits
        Bits of a number, sign included. At most 2^(32 - bits) clients fit in a round.
    """

    name: Literal["secagg_plus"] = "secagg_plus"
    neighbors: Annotated[int, Field(ge=2, le=1000)] = 32
    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.6
    clip_range: PositiveFloat = 1.0
    bits: Annotated[int, Field(ge=2, le=28)] = 20


@dataclass(frozen=True)
class PairwiseSettings(Settings):
    """Masks between each pair of clients, for a handful that are all present.

    One key agreement serves a whole run. A round is repeated without a missing client.

    Attributes
    ----------
    clip_range, bits
        As for ``secagg_plus``.
    """

    name: Literal["pairwise"] = "pairwise"
    clip_range: PositiveFloat = 1.0
    bits: Annotated[int, Field(ge=2, le=28)] = 20


SecureAggregation = Annotated[
    SecAggPlusSettings | PairwiseSettings, Field(discriminator="name")
]
