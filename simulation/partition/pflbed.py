"""Clients of several domains that share their domain's test split."""

from dataclasses import dataclass

import numpy as np

from knnper.data.examples import Dataset
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, PositiveFloat, PositiveInt, ProperFraction
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import (
    Assignment,
    ClassWeights,
    Integers,
    PartitionSettings,
    apportion,
    assignment_of,
    deal,
)
from knnper.simulation.partition.dirichlet import draw_log_dirichlet, normalise


@dataclass(frozen=True, kw_only=True)
class PflbedSettings(PartitionSettings):
    """How many clients a domain has, and how uneven they are.

    Attributes
    ----------
    seen_clients_per_domain, unseen_clients_per_domain
        M', the clients that take part in training, and those that arrive only after
        it; 20 and 10 in the paper.
    alpha
        α of the labels at the clients of one domain; 0.3 in the paper.
    unseen_fraction
        Here the part of each domain's training data that its unseen clients have. The
        paper deals 60 % and 20 % of all images to the two groups, which is 0.25.
    """

    seen_clients_per_domain: PositiveInt = 20
    unseen_clients_per_domain: NonNegativeInt = 10
    alpha: PositiveFloat = 0.3
    unseen_fraction: ProperFraction = 0.25


def pflbed(data: Dataset, settings: PflbedSettings, key: RandomKey) -> Assignment:
    """Deal each domain's training data to clients of its own.

    The procedure of fedbasis-pflbed.txt, section 5: of each label of a domain, a part
    goes to the seen clients and the rest to the unseen ones, and within either group it
    is spread by q ~ Dir(α). Each client is tested on the whole test split of its
    domain, in which an example counts as the client's share P_m(y) of training data
    with its label. A client whose labels the test split lacks is not tested.

    Parameters
    ----------
    data
        Says which domain each sample is from.

    Returns
    -------
    Assignment
        Domain after domain, of each the seen clients first.

    Raises
    ------
    DataError
        If the data set does not know domains.
    """
    train_domains, test_domains = data.train.domain_ids, data.test.domain_ids
    if train_domains is None or test_domains is None:
        raise DataError(
            f"the partition pflbed needs a data set of several domains, {data.name} "
            "names none; use domain_folder or digit_domains, or choose another "
            "partition"
        )
    shares = [
        _share(
            _of_domain(data.train.labels, train_domains, domain),
            _of_domain(data.test.labels, test_domains, domain),
            data.spec.num_classes,
            settings,
            key.child(name),
        )
        for domain, name in enumerate(data.domain_names)
    ]
    return _together(shares)


@dataclass(frozen=True, eq=False)
class _Samples:
    """Samples of one domain: positions in the whole split, and labels."""

    positions: Integers
    labels: Integers


def _of_domain(labels: Integers, domains: Integers, domain: int) -> _Samples:
    positions = np.flatnonzero(domains == domain)
    return _Samples(positions, labels[positions])


def _share(
    train: _Samples,
    test: _Samples,
    num_classes: int,
    settings: PflbedSettings,
    key: RandomKey,
) -> Assignment:
    """Deal the samples of one domain."""
    totals = np.bincount(train.labels, minlength=num_classes)
    counts = _counts(totals, settings, key)
    num_clients = counts.shape[1]
    owner = deal(train.labels, counts, key.child("train"))
    nobody = np.empty(0, dtype=np.int64)
    dealt = assignment_of(owner, nobody, num_clients)
    weights = tuple(_distribution(column) for column in counts.T)
    return Assignment(
        train=tuple(train.positions[samples] for samples in dealt.train),
        test=tuple(
            test.positions if one[test.labels].any() else nobody for one in weights
        ),
        seen=tuple(
            number < settings.seen_clients_per_domain for number in range(num_clients)
        ),
        class_weights=weights,
    )


def _counts(totals: Integers, settings: PflbedSettings, key: RandomKey) -> Integers:
    """Return how many samples of each label each client gets.

    Parameters
    ----------
    totals
        Samples of each label, shape (c,).

    Returns
    -------
    Shape (c, M'), the seen clients first; row y sums to ``totals[y]``.
    """
    num_unseen = settings.unseen_clients_per_domain
    unseen_part = settings.unseen_fraction if num_unseen else 0.0
    parts = np.tile([1.0 - unseen_part, unseen_part], (len(totals), 1))
    groups = apportion(parts, totals, key.child("groups").numpy())
    seen = _spread(
        groups[:, 0],
        settings.seen_clients_per_domain,
        settings.alpha,
        key.child("seen"),
    )
    if num_unseen == 0:
        return seen
    unseen = _spread(groups[:, 1], num_unseen, settings.alpha, key.child("unseen"))
    return np.concatenate([seen, unseen], axis=1)


def _spread(
    totals: Integers, num_clients: int, alpha: float, key: RandomKey
) -> Integers:
    """Spread the samples of each label over clients by Dir(α); shape (c, M')."""
    shape = (len(totals), num_clients)
    draws = draw_log_dirichlet(alpha, shape, key.child("weights").numpy())
    return apportion(normalise(draws), totals, key.child("round").numpy())


def _distribution(counts: Integers) -> ClassWeights:
    """Return P_m(y), shape (c,); zeros for a client without samples."""
    distribution: ClassWeights = counts / max(int(counts.sum()), 1)
    return distribution


def _together(shares: list[Assignment]) -> Assignment:
    return Assignment(
        train=tuple(part for share in shares for part in share.train),
        test=tuple(part for share in shares for part in share.test),
        seen=tuple(one for share in shares for one in share.seen or ()),
        class_weights=tuple(
            one for share in shares for one in share.class_weights or ()
        ),
    )
