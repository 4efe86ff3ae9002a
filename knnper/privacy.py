"""Accounting of differential privacy: the ε of releases, and the noise for an ε.

Two data sets are neighbours if one has one unit more: a client, or an example. A
release is a sum over the units with Gaussian noise of standard deviation σ S, where S
bounds the norm of what one unit adds to the sum. The figures are those of Google's
package ``dp_accounting``, which the extra ``privacy`` installs: privacy loss
distributions (Doroshenko et al. 2022) or Rényi differential privacy (Mironov 2017;
Mironov et al. 2019 for Poisson samples). Both are upper bounds on ε. Releases without
sampling have a closed form, which replaces their distribution.
"""

import functools
import logging
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from knnper.errors import RunError
from knnper.process import import_extra
from knnper.seeding import RandomKey

AccountantName = Literal["pld", "rdp"]

# Width of the steps in which a distribution of the privacy loss is kept. With ten times
# that of ``dp_accounting`` each round has its ε ten times as fast, which is at most a
# few per cent larger.
LOSS_INTERVAL = 1e-3
_MOST_NOISE = 10**7
_CLOSE = 1e-3  # relative error of a noise multiplier that is searched

NoiseSource = Callable[[RandomKey], np.random.Generator]
"""Makes the generator of noise for a purpose."""


@dataclass(frozen=True)
class Release:
    """Equal releases of a sum with Gaussian noise.

    Attributes
    ----------
    noise_multiplier
        σ: the standard deviation of the noise, as a multiple of the largest norm of
        what one unit adds to the sum. 0 is no noise, and ε is infinite.
    sampling
        q: the probability with which each unit is part of a sum, independently of all
        others (Poisson sampling). 1 if units are chosen in any other way.
    count
        Number of these releases.
    """

    noise_multiplier: float
    sampling: float = 1.0
    count: int = 1


def seeded_noise(key: RandomKey) -> np.random.Generator:
    """Return the generator of a key: noise that repeats, and so is no protection."""
    return key.numpy()


def system_noise(_: RandomKey | None = None) -> np.random.Generator:
    """Return a generator seeded by the operating system, for real clients."""
    return np.random.Generator(np.random.PCG64(secrets.randbits(128)))


def default_delta(num_units: int) -> float:
    """Return n^-1.1 for n units: smaller than 1/n, as δ must be."""
    return float(max(num_units, 2) ** -1.1)


def epsilon_of(
    releases: Iterable[Release],
    delta: float,
    accountant: AccountantName = "pld",
) -> float:
    """Return the ε at ``delta`` of all releases together; infinite without noise."""
    counted = [release for release in releases if release.count]
    if not counted:
        return 0.0
    if any(release.noise_multiplier == 0 for release in counted):
        return math.inf
    return _epsilon(tuple(counted), delta, accountant)


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    *,
    sampling: float = 1.0,
    count: int = 1,
    accountant: AccountantName = "pld",
) -> float:
    """Return the smallest σ, to a thousandth, with which releases spend ``epsilon``."""

    def spends_too_much(noise_multiplier: float) -> bool:
        release = Release(noise_multiplier, sampling, count)
        return epsilon_of([release], delta, accountant) > epsilon

    # The bounds come from the faster accountant: its ε is never smaller.
    high = 1.0
    while epsilon_of([Release(high, sampling, count)], delta, "rdp") > epsilon:
        high *= 2
        if high > _MOST_NOISE:
            raise RunError(
                f"found no noise for epsilon {epsilon:g} at delta {delta:g}; expected "
                "a larger epsilon or fewer rounds"
            )
    low = 0.0
    while high - low > _CLOSE * high and high > 2 * _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if spends_too_much(middle) else (low, middle)
    return high


@functools.lru_cache(maxsize=1024)
def _epsilon(
    releases: tuple[Release, ...], delta: float, accountant: AccountantName
) -> float:
    dp = _import("dp_accounting")
    if accountant == "pld" and all(release.sampling == 1 for release in releases):
        # Gaussian releases compose like one with the precisions added (Dong et al.
        # 2022, Corollary 3.3). Its ε is exact (Balle and Wang 2018, Theorem 8).
        precision = math.fsum(
            release.count / release.noise_multiplier**2 for release in releases
        )
        return float(dp.get_epsilon_gaussian(precision**-0.5, delta))
    if accountant == "pld":
        pld = _import("dp_accounting.pld")
        counter = pld.PLDAccountant(value_discretization_interval=LOSS_INTERVAL)
    else:
        counter = _import("dp_accounting.rdp").RdpAccountant()
    for release in releases:
        event = dp.GaussianDpEvent(release.noise_multiplier)
        if release.sampling < 1:
            event = dp.PoissonSampledDpEvent(release.sampling, event)
        counter.compose(event, release.count)
    return float(counter.get_epsilon(delta))


def _import(module: str) -> Any:
    # The package warns of each Rényi order that it leaves out; ε stays a bound.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return import_extra(module, "privacy", "the accounting of privacy")
