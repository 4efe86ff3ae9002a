"""The partition ``pflbed``: clients of several domains (Chen et al. 2023)."""

from dataclasses import dataclass

import numpy as np

from knnper.data.examples import Dataset
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
)
from knnper.simulation.partition.allocation import (
    Assignment,
    ClassWeights,
    Integers,
    allocate,
    apportion,
    assignment_of,
)
from knnper.simulation.partition.dirichlet import draw_log_dirichlet, normalise
from knnper.simulation.partition.settings import PartitionSettings

_NOTHING: Integers = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class PflbedSettings(PartitionSettings):
    """The number of clients of a domain, and their heterogeneity.

    Attributes
    ----------
    seen_clients_per_domain, unseen_clients_per_domain
        M', the clients that take part in training, and those that arrive after it; 20
        and 10 in the paper.
    alpha
        α of the labels at the clients of one domain; 0.3 in the paper.
    unseen_fraction
        Fraction of each domain's training data that its unseen clients have. The paper
        gives 60 % and 20 % of all images to the two groups, which is 0.25.
    """

    seen_clients_per_domain: PositiveInt = 20
    unseen_clients_per_domain: NonNegativeInt = 10
    alpha: PositiveFloat = 0.3
    unseen_fraction: ProperFraction = 0.25


def pflbed(data: Dataset, settings: PflbedSettings, key: RandomKey) -> Assignment:
    """Split each domain's training data over clients of its own.

    The procedure of Chen et al. 2023, section 5: of each label of a domain, a fraction
    goes to the seen clients and the rest to the unseen clients, and within either group
    it is spread by q ~ Dir(α). Each client is tested on the whole test split of its
    domain, with examples weighted by P_m(y), the fraction of its training data with
    their label. A client is not tested if the test split has none of its labels.
    """
    train_domains, test_domains = data.train.domain_ids, data.test.domain_ids
    if train_domains is None or test_domains is None:
        raise DataError(
            f"the partition pflbed needs a data set of several domains, {data.name} "
            "names none; use domain_folder or digit_domains, or choose another "
            "partition"
        )
    clients = list[tuple[Integers, Integers, bool, ClassWeights]]()
    for domain, name in enumerate(data.domain_names):
        train = np.flatnonzero(train_domains == domain)
        test = np.flatnonzero(test_domains == domain)
        labels = data.train.labels[train]
        of_domain = key.child(name)
        totals = np.bincount(labels, minlength=data.spec.num_classes)
        counts = _counts(totals, settings, of_domain)
        owner = allocate(labels, counts, of_domain.child("train"))
        assigned = assignment_of(owner, _NOTHING, counts.shape[1])
        for number, (samples, column) in enumerate(
            zip(assigned.train, counts.T, strict=True)
        ):
            # P_m(y), shape (c,); zeros for a client without samples.
            weights = column / max(int(column.sum()), 1)
            own_test = test if weights[data.test.labels[test]].any() else _NOTHING
            seen = number < settings.seen_clients_per_domain
            clients.append((train[samples], own_test, seen, weights))
    return Assignment(*zip(*clients, strict=True))


def _counts(totals: Integers, settings: PflbedSettings, key: RandomKey) -> Integers:
    """Return counts by label and client, shape (c, M'), the seen clients first."""
    num_unseen = settings.unseen_clients_per_domain
    unseen_part = settings.unseen_fraction if num_unseen else 0.0
    parts = np.tile([1.0 - unseen_part, unseen_part], (len(totals), 1))
    groups = apportion(parts, totals, key.child("groups").numpy())
    sizes, spread = (settings.seen_clients_per_domain, num_unseen), []
    for group, size, name in zip(groups.T, sizes, ("seen", "unseen"), strict=True):
        if size:
            # Each label over the clients of the group by Dir(α).
            shape = (len(totals), size)
            group_key = key.child(name)
            generator = group_key.child("weights").numpy()
            draws = draw_log_dirichlet(settings.alpha, shape, generator)
            rounding = group_key.child("round").numpy()
            spread.append(apportion(normalise(draws), group, rounding))
    return np.concatenate(spread, axis=1)
