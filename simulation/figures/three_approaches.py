"""The three approaches on the synthetic mixture: clusters, data and models mixed.

three-approaches-hypcluster-dapper-mapper.txt, section 7.1, Figure 2 and Table 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from knnper.config.ranges import PositiveInt
from knnper.config.sections import Settings
from knnper.data.synthetic_mixture import SyntheticMixtureSettings, density
from simulation.figures.options import SampleCount, ThreeApproachesOptions

Sections = Mapping[str, Mapping[str, Any]]
"""Sections of an experiment, each with the settings that differ from the others'."""

PASSES = 5
"""Over a client's data, wherever one trains for itself."""

RATES = (0.3, 1.0, 3.0)
"""Of which a client's own training takes the best on validation data."""

TOGETHER = (0.1, 0.3, 1.0)
"""Of which FedAvg and HypCluster take theirs; what goes on from FedAvg has 1."""


@dataclass(frozen=True)
class ThreeApproachesSettings(Settings):
    """What the figure shows.

    Attributes
    ----------
    samples
        m, the examples of a user: the points of the first half. 3 leave one for
        validation, the fewest.
    clusters
        q of HypCluster: the points of the second half.
    num_users
        p.
    samples_for_clusters
        m in the second half.
    num_starts
        Runs of HypCluster with other seeds, of which the best on validation data is
        taken.
    num_rounds
        Of everything that is trained in rounds.
    """

    samples: tuple[SampleCount, ...] = ThreeApproachesOptions.samples
    clusters: tuple[PositiveInt, ...] = ThreeApproachesOptions.clusters
    num_users: PositiveInt = ThreeApproachesOptions.users
    samples_for_clusters: SampleCount = 100
    num_starts: PositiveInt = 3
    num_rounds: PositiveInt = 10


@dataclass(frozen=True)
class Candidate:
    """One of several settings, of which validation data chooses.

    Attributes
    ----------
    trained
        With what the rounds are made.
    served
        With what clients are personalised after them; sections take the place of those
        of the same name.
    chosen
        What sets it apart.
    """

    trained: Sections
    served: Sections
    chosen: Mapping[str, float]


def _of_rates(
    trained: Sections,
    section: str,
    settings: Mapping[str, Any],
    key: str = "learning_rate",
) -> tuple[Candidate, ...]:
    """Return a candidate for each rate, which is ``key`` of a section's settings."""
    return tuple(
        Candidate(trained, {section: {**settings, key: rate}}, {"learning_rate": rate})
        for rate in RATES
    )


_FEDAVG: Sections = {"method": {"name": "fedavg"}}
_MAPPER = {"name": "mapper", "local_epochs": PASSES}
_WITH_PROXY: Sections = {
    **_FEDAVG,
    "personalization": {"name": "dapper"},
    "partition": {"proxy_fraction": 0.1},
}

HYPCLUSTER = "HypCluster (4)"


def hypcluster(
    num_clusters: int, starts: Iterable[int], rates: Iterable[float] = TOGETHER
) -> tuple[Candidate, ...]:
    """Return HypCluster from several starts at several rates.

    Parameters
    ----------
    num_clusters
        q.
    starts
        Seeds: it may end in a bad division of the users.
    rates
        Of the training in rounds.
    """
    method = {"name": "hypcluster", "num_clusters": num_clusters}
    return tuple(
        Candidate(
            {"method": method, **_at(rate), "run": {"seed": start}},
            {},
            {"learning_rate": rate, "start": start},
        )
        for start in starts
        for rate in rates
    )


def _at(rate: float) -> Sections:
    return {"training": {"learning_rate": rate}}


APPROACHES: Mapping[str, tuple[Candidate, ...]] = MappingProxyType(
    {
        "Global (FedAvg)": tuple(
            Candidate({**_FEDAVG, **_at(rate)}, {}, {"learning_rate": rate})
            for rate in TOGETHER
        ),
        "Local": _of_rates(
            {"method": {"name": "local", "num_rounds": 1}},
            "training",
            {"local_steps": None, "local_epochs": PASSES},
        ),
        "Fine-tuning": _of_rates(
            _FEDAVG, "personalization", {"name": "fine_tuning", "num_epochs": PASSES}
        ),
        "Dapper": _of_rates(
            _WITH_PROXY, "personalization", {"name": "dapper", "num_epochs": PASSES}
        ),
        "Mapper": _of_rates(
            {"method": {**_MAPPER, "local_learning_rate": 1.0}},
            "method",
            _MAPPER,
            key="local_learning_rate",
        ),
        "Mapper in two stages": _of_rates(
            _FEDAVG,
            "personalization",
            {"name": "mapper_two_stage", "local_epochs": PASSES},
            key="local_learning_rate",
        ),
    }
)
"""By title; HypCluster comes beside them, since its starts depend on the seed."""


def least_losses(num_users: int) -> Mapping[str, float]:
    """Return the smallest mean loss that is possible, by who shares a model.

    That of the mean density of those who share it.
    """
    mixture = SyntheticMixtureSettings(num_users=num_users)
    users = range(num_users)
    densities = np.stack([density(mixture, user) for user in users])

    def least(groups: Iterable[int]) -> float:
        of_user = np.array(list(groups))
        means = [densities[of_user == group].mean(axis=0) for group in of_user]
        return float(-(densities * np.log(means)).sum(axis=1).mean())

    return {
        "one model": least(0 for _ in users),
        "a model for each cluster": least(
            user % mixture.num_clusters for user in users
        ),
        "a model for each user": least(users),
    }
