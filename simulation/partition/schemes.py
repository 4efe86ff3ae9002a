"""Partition schemes, which assign every sample to exactly one client."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from knnper.data.examples import Dataset
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Settings,
)

Integers: TypeAlias = NDArray[np.int64]
ClassWeights: TypeAlias = NDArray[np.float64]

# Remainders that are equal to this many decimals differ by rounding errors only.
_DECIMALS = 9
# Keeps logarithms finite, so that none of their differences is NaN.
_LARGEST_DROP = 1e300
_NOTHING: Integers = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Shares(Sequence[Integers]):
    """The samples of each client, in one array for all of them."""

    samples: Integers  # of client 0, then of client 1, ...
    ends: Integers  # the end of each client's samples, shape (M,)

    @classmethod
    def of(cls, parts: Sequence[Integers]) -> "Shares":
        """Concatenate the clients' arrays."""
        if isinstance(parts, Shares):
            return parts
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        nothing = np.empty(0, dtype=np.int64)
        return cls(np.concatenate([nothing, *parts]).astype(np.int64), ends)

    @property
    def sizes(self) -> Integers:
        """How many samples each client has, shape (M,)."""
        return np.diff(self.ends, prepend=0)

    def within(self, samples: Integers) -> "Shares":
        """Map samples, which are positions in ``samples``, to these samples."""
        return Shares(samples[self.samples], self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Integers: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Integers]: ...
    def __getitem__(self, client: int | slice) -> Integers | Sequence[Integers]:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        number = range(len(self))[client]
        start = self.ends[number - 1] if number else 0
        return self.samples[start : self.ends[number]]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The samples of each client: sorted int64 indices into both splits.

    Attributes
    ----------
    seen
        Whether each client may take part in training; None to draw the unseen clients
        by ``unseen_fraction``.
    class_weights
        P_m(y), the weight of a test example of each label for client m, shape (c,);
        None for equal weights.
    names
        The clients' names in the data; empty if it has none.
    """

    train: Sequence[Integers]
    test: Sequence[Integers]
    seen: tuple[bool, ...] | None = None
    class_weights: tuple[ClassWeights, ...] | None = None
    names: tuple[str, ...] = ()


def assignment_of(
    train_owner: Integers, test_owner: Integers, num_clients: int
) -> Assignment:
    """Return the samples of each client from the owner, 0 ... M-1, of each sample."""
    return Assignment(
        _samples_by(train_owner, num_clients), _samples_by(test_owner, num_clients)
    )


def _samples_by(values: Integers, num_values: int) -> Shares:
    """Return the positions of each value 0, 1, ..., ascending."""
    ordered = np.argsort(values, kind="stable")
    return Shares(ordered, np.cumsum(np.bincount(values, minlength=num_values)))


def apportion(
    weights: NDArray[np.float64], totals: Integers, generator: np.random.Generator
) -> Integers:
    """Split each total into whole numbers proportional to a row of weights.

    Largest remainder rounding; equal remainders are ordered at random. An entry of
    weight 0 gets nothing, except in a row of zeros, which counts as equal weights.
    ``weights``, not negative, and the result have shape (rows, M), ``totals`` (rows,).
    """
    rows = zip(weights, totals.tolist(), strict=True)
    return np.array([_apportioned(row, total, generator) for row, total in rows])


def _apportioned(
    weights: NDArray[np.float64], total: int, generator: np.random.Generator
) -> Integers:
    """Split one total, see `apportion`; a row needs no memory but its own."""
    weights = weights if weights.any() else np.ones_like(weights)
    shares = weights / weights.sum() * total
    counts: Integers = np.floor(shares).astype(np.int64)
    # No entry without weight may be rounded up.
    lacking = np.where(weights == 0, 1.0, -np.round(shares - counts, _DECIMALS))
    lots = generator.random(len(shares))
    missing = int(total - counts.sum())
    if missing > 0:
        last = np.partition(lacking, missing - 1)[missing - 1]
        ties = np.flatnonzero(lacking == last)
        counts[lacking < last] += 1
        num_left = missing - np.count_nonzero(lacking < last)
        counts[ties[np.argsort(lots[ties], kind="stable")[:num_left]]] += 1
    return counts


def allocate(labels: Integers, counts: Iterable[Integers], key: RandomKey) -> Integers:
    """Give each client random samples: ``counts[y][m]`` of label y to client m.

    Row y of ``counts`` sums to the number of samples with label y. Returns the client
    of each sample, shape (n,).
    """
    owner = np.full(len(labels), -1)
    samples_of = _samples_by(labels, int(labels.max(initial=-1)) + 1)
    for label, of_label in enumerate(counts):
        if label < len(samples_of):
            samples = samples_of[label]
            shuffled = key.child(label).numpy().permutation(samples)
            owner[shuffled] = np.repeat(np.arange(len(of_label)), of_label)
    if (owner < 0).any():
        raise ValueError("expected a row of counts for each label that samples have")
    return owner


def allocate_test_like_train(
    train_counts: Iterable[Integers],
    test_labels: Integers,
    key: RandomKey,
    weights: NDArray[np.float64] | None = None,
) -> Integers:
    """Split the test samples so that no client is tested on a label it cannot know.

    Each label's are split in proportion to ``weights``, by default ``train_counts``,
    both of shape (num_labels, M). A client without training samples of a label gets
    none, unless no client has any: then all get some. Returns the client of each.
    """
    generator = key.child("round").numpy()

    def counts() -> Iterator[Integers]:
        for label, trained in enumerate(train_counts):
            proportions = trained if weights is None else weights[label]
            held = np.where(trained > 0, proportions, 0.0)
            # The weights of all clients with the label may underflow to 0.
            usable = held if held.any() else (trained > 0).astype(np.float64)
            total = int(np.count_nonzero(test_labels == label))
            yield _apportioned(usable, total, generator)

    return allocate(test_labels, counts(), key.child("deal"))


def count_labels(
    labels: Integers, owner: Integers, shape: tuple[int, int]
) -> Iterator[Integers]:
    """Yield for each label the clients' counts, (M,); ``shape`` is (num_labels, M)."""
    for samples in _samples_by(labels, shape[0]):
        yield np.bincount(owner[samples], minlength=shape[1])


def num_labels_of(train_labels: Integers, test_labels: Integers) -> int:
    """Return the smallest number of labels, one at least, that covers both splits."""
    return int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1


@dataclass(frozen=True, kw_only=True)
class PartitionSettings(Settings):
    """Settings of every partition.

    Attributes
    ----------
    unseen_fraction
        Fraction of the clients that arrive only after training, [0, 1); 0.2 in the
        paper's experiment on unseen clients (Marfoq et al. 2022, section 6).
    validation_fraction
        Fraction of each client's training data held out for its own choices, [0, 1);
        0.2 in the paper (section 5). Drawn at random, but of text the last part.
    used_fraction
        Fraction of both splits of the data set that is used, (0, 1], drawn by the
        seed. For small trials with large data.
    evaluate_on
        The split that clients are evaluated on. With ``validation`` each client's
        validation split replaces its test split, and the same fraction of the rest
        replaces its validation split: hyper-parameters are compared without reading a
        test split.
    proxy_fraction
        Fraction of the training split that the server keeps, [0, 1), drawn at random
        before the rest is split over the clients. ``dapper`` samples from it.
    unseen_train_fraction
        Fraction of its training and validation data that an unseen client uses, (0,
        1]. A smaller fraction is a subset of a larger one, and nothing else changes.
        0.5 and 1 are the small and the moderate sizes of Chen et al. 2023, appendix
        B.1.
    """

    unseen_fraction: ProperFraction = 0.0
    validation_fraction: ProperFraction = 0.2
    used_fraction: PositiveFraction = 1.0
    evaluate_on: Literal["test", "validation"] = "test"
    proxy_fraction: ProperFraction = 0.0
    unseen_train_fraction: PositiveFraction = 1.0


@dataclass(frozen=True, kw_only=True)
class CountedSettings(PartitionSettings):
    """Settings of a partition that takes the number of clients.

    Attributes
    ----------
    num_clients
        M; 200 in the paper's CIFAR experiments (table 1).
    """

    num_clients: PositiveInt


@dataclass(frozen=True, kw_only=True)
class IidSettings(CountedSettings):
    """Settings that all partitions have."""


def iid(
    train_labels: Integers, test_labels: Integers, settings: IidSettings, key: RandomKey
) -> Assignment:
    """Split the training samples at random; sizes differ by at most one.

    Each label's test samples follow its training samples.
    """
    num_clients = settings.num_clients
    places = np.arange(len(train_labels)) % num_clients
    train_owner = key.child("train").numpy().permutation(places)
    shape = (num_labels_of(train_labels, test_labels), num_clients)
    test_owner = allocate_test_like_train(
        count_labels(train_labels, train_owner, shape), test_labels, key.child("test")
    )
    return assignment_of(train_owner, test_owner, num_clients)


@dataclass(frozen=True, kw_only=True)
class NaturalSettings(PartitionSettings):
    """Settings that all partitions have; the data names the clients."""


def natural(
    train_client_ids: Integers | None,
    test_client_ids: Integers | None,
    names: Sequence[str] = (),
) -> Assignment:
    """Give each client its own samples; clients are ordered by their ids."""
    if train_client_ids is None or test_client_ids is None:
        raise DataError(
            "the partition natural needs a data set that names the client of each "
            "sample: set data.client of a table, give image folders for each client or "
            "data.client_separator, or arrays named clients; or choose another "
            "partition"
        )
    clients, owner = np.unique(
        np.concatenate([train_client_ids, test_client_ids]), return_inverse=True
    )
    num_train = len(train_client_ids)
    assignment = assignment_of(owner[:num_train], owner[num_train:], len(clients))
    if not names:
        return assignment
    return replace(assignment, names=tuple(names[client] for client in clients))


def draw_log_dirichlet(
    concentration: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw symmetric Dirichlet vectors along the last axis, as unnormalised logarithms.

    A Dirichlet vector is a vector of Gamma(α) draws divided by its sum. For small α
    these are all 0 in floating point; their logarithms are not: Gamma(α) is
    Gamma(α + 1) * U^(1/α), and -log U is a standard exponential draw.
    """
    # In place: with a million clients each array is large.
    log_weights = generator.standard_gamma(concentration + 1.0, shape)
    np.log(log_weights, out=log_weights)
    drops = generator.standard_exponential(shape)
    # A constant for each vector: its largest weight keeps its digits.
    drops -= drops.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        drops /= concentration
    log_weights -= np.minimum(drops, _LARGEST_DROP, out=drops)
    return log_weights


def normalise(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, which sum to 1 along the last axis."""
    weights: NDArray[np.float64] = log_weights - log_weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


@dataclass(frozen=True, kw_only=True)
class DirichletSettings(CountedSettings):
    """The heterogeneity of the clients.

    Attributes
    ----------
    alpha
        α; a smaller value gives a client fewer labels. 0.1, 0.3 and 1.0 in the paper.
    """

    alpha: PositiveFloat = 0.3


def dirichlet(
    train_labels: Integers,
    test_labels: Integers,
    settings: DirichletSettings,
    key: RandomKey,
) -> Assignment:
    """Allocate a fraction p_{y,m} of the samples of label y to client m.

    For each label y, p_y ~ Dir_M(α); the same p_y serves training and test samples
    (Marfoq et al. 2022, section 5). Where rounding leaves a client without training
    samples of a label, its test samples of that label go to the clients that have some.
    """
    num_labels = num_labels_of(train_labels, test_labels)
    shape = (num_labels, settings.num_clients)
    generator = key.child("weights").numpy()
    weights = normalise(draw_log_dirichlet(settings.alpha, shape, generator))
    totals = np.bincount(train_labels, minlength=num_labels)
    counts = apportion(weights, totals, key.child("round").numpy())
    train_owner = allocate(train_labels, counts, key.child("train"))
    test_owner = allocate_test_like_train(
        counts, test_labels, key.child("test"), weights
    )
    return assignment_of(train_owner, test_owner, settings.num_clients)


@dataclass(frozen=True, kw_only=True)
class PathologicalSettings(CountedSettings):
    """The number of labels of a client.

    Attributes
    ----------
    classes_per_client
        2 for CIFAR-10 (v2) and 10 for CIFAR-100 (v2) in the paper.
    shares
        How the clients of a label share its samples: ``even``, or ``uneven`` in
        proportion to draws from U(0.4, 0.6) (Achituve et al. 2021).
    """

    classes_per_client: PositiveInt = 2
    shares: Literal["even", "uneven"] = "even"


def pathological(
    train_labels: Integers,
    test_labels: Integers,
    settings: PathologicalSettings,
    key: RandomKey,
) -> Assignment:
    """Give each client exactly c labels, and each label to as many clients as another.

    The data sets "v2" of Marfoq et al. 2022, section 5, after Achituve et al. (2021).
    """
    totals = np.bincount(
        train_labels, minlength=num_labels_of(train_labels, test_labels)
    )
    present = np.flatnonzero(totals)
    _require_enough_slots(len(present), settings)
    has_label = _choose_labels(present, len(totals), settings, key.child("labels"))
    _require_enough_samples(totals, has_label.sum(axis=1), settings)
    weights = has_label.astype(np.float64)
    if settings.shares == "uneven":
        weights *= key.child("shares").numpy().uniform(0.4, 0.6, weights.shape)
    counts = apportion(weights, totals, key.child("round").numpy())
    train_owner = allocate(train_labels, counts, key.child("train"))
    test_owner = allocate_test_like_train(counts, test_labels, key.child("test"))
    return assignment_of(train_owner, test_owner, settings.num_clients)


def _choose_labels(
    present: Integers, num_labels: int, settings: PathologicalSettings, key: RandomKey
) -> Integers:
    """Choose the labels of each client: 0 or 1, shape (num_labels, M).

    Labels are handed out in passes over all of them, each in a new random order, so
    all are handed out equally often up to one.
    """
    has_label = np.zeros((num_labels, settings.num_clients), dtype=np.int64)
    waiting: list[int] = []
    num_passes = 0
    for client in range(settings.num_clients):
        chosen = waiting[: settings.classes_per_client]
        waiting = waiting[settings.classes_per_client :]
        lacking = settings.classes_per_client - len(chosen)
        if lacking:
            order = key.child(num_passes).numpy().permutation(present).tolist()
            num_passes += 1
            # A client with labels from two passes must not get the same label twice.
            order.sort(key=chosen.__contains__)
            chosen, waiting = chosen + order[:lacking], order[lacking:]
        has_label[chosen, client] = 1
    return has_label


def _require_enough_slots(num_labels: int, settings: PathologicalSettings) -> None:
    per_client, clients = settings.classes_per_client, settings.num_clients
    if per_client > num_labels:
        raise DataError(
            f"partition.classes_per_client is {per_client}, but the training data has "
            f"only {num_labels} classes; lower it"
        )
    if per_client * clients < num_labels:
        raise DataError(
            f"{clients} clients with {per_client} classes each cannot hold all "
            f"{num_labels} classes; raise partition.num_clients or "
            "partition.classes_per_client"
        )


def _require_enough_samples(
    totals: Integers, num_owners: Integers, settings: PathologicalSettings
) -> None:
    short = np.flatnonzero(totals < num_owners)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {totals[label]} training samples for the "
            f"{num_owners[label]} clients that {settings.num_clients} clients with "
            f"{settings.classes_per_client} classes each give it; lower "
            "partition.num_clients or partition.classes_per_client"
        )


@dataclass(frozen=True, kw_only=True)
class PachinkoSettings(CountedSettings):
    """The heterogeneity of the clients.

    Attributes
    ----------
    alpha
        α, of the coarse labels at a client; 0.3 in the paper.
    beta
        β, of the fine labels within a coarse label; 10 in the paper.
    """

    alpha: PositiveFloat = 0.3
    beta: PositiveFloat = 10.0


def pachinko(
    train_labels: Integers,
    test_labels: Integers,
    coarse_of: tuple[int, ...] | None,
    settings: PachinkoSettings,
    key: RandomKey,
) -> Assignment:
    """Let each client draw an equal share of the training samples, one after another.

    A draw is a coarse label by the client's Dir(α), then one of its fine labels by
    the client's Dir(β), then a sample of it, without replacement. Exhausted labels
    drop out and the weights are renormalised (Li and McCallum, 2006; Reddi et al.,
    2021, appendix F; Marfoq et al. 2022, section 5). Each label's test samples follow
    its training samples. ``coarse_of`` is the coarse label of each label.
    """
    num_labels = num_labels_of(train_labels, test_labels)
    coarse = _coarse_labels(coarse_of, num_labels)
    stock = np.bincount(train_labels, minlength=len(coarse))
    counts = _draw_counts(stock, coarse, settings, key)
    train_owner = allocate(train_labels, counts, key.child("train"))
    test_owner = allocate_test_like_train(counts, test_labels, key.child("test"))
    return assignment_of(train_owner, test_owner, settings.num_clients)


def _coarse_labels(coarse_of: tuple[int, ...] | None, num_labels: int) -> Integers:
    if coarse_of is None:
        raise DataError(
            "the partition pachinko needs a data set with coarse labels, such as "
            "cifar100; choose that, or the partition dirichlet"
        )
    if len(coarse_of) < num_labels:
        raise DataError(
            f"the data set names the coarse label of {len(coarse_of)} labels, but has "
            f"{num_labels}"
        )
    return np.unique(np.array(coarse_of), return_inverse=True)[1]


def _draw_counts(
    stock: Integers, coarse: Integers, settings: PachinkoSettings, key: RandomKey
) -> Integers:
    """Return the number of samples by label and client, shape (num_labels, M)."""
    num_clients = settings.num_clients
    num_coarse = int(coarse.max()) + 1
    remaining = stock.copy()
    counts = np.zeros((len(stock), num_clients), dtype=np.int64)
    bounds = np.arange(num_clients + 1) * int(stock.sum()) // num_clients
    for client, size in enumerate(np.diff(bounds)):
        generator = key.child("client", client).numpy()
        coarse_logs = draw_log_dirichlet(settings.alpha, (num_coarse,), generator)
        # Unnormalised: each coarse label's fine labels are normalised on their own.
        fine_logs = draw_log_dirichlet(settings.beta, (len(stock),), generator)
        while (lacking := int(size - counts[:, client].sum())) > 0:
            weights = _label_weights(coarse_logs, fine_logs, coarse, remaining > 0)
            drawn = _draw_until_exhausted(weights, remaining, lacking, generator)
            counts[:, client] += drawn
            remaining -= drawn
    return counts


def _label_weights(
    coarse_logs: NDArray[np.float64],  # log-weights, shape (num_coarse,)
    fine_logs: NDArray[np.float64],  # shape (num_labels,)
    coarse: Integers,  # of each label
    available: NDArray[np.bool_],  # which labels still have samples; one at least
) -> NDArray[np.float64]:
    """Return the chance of each label at the next draw, shape (num_labels,)."""
    of_coarse = coarse == np.arange(len(coarse_logs))[:, None]
    usable = of_coarse & available
    open_coarse = usable.any(axis=1)
    coarse_weights = normalise(coarse_logs[open_coarse])
    fine_weights = normalise(np.where(usable, fine_logs, -np.inf)[open_coarse])
    weights: NDArray[np.float64] = coarse_weights @ fine_weights
    weights /= weights.sum()
    return weights


def _draw_until_exhausted(
    weights: NDArray[np.float64],  # shape (num_labels,); 0 for exhausted labels
    remaining: Integers,  # samples of each label
    size: int,
    generator: np.random.Generator,
) -> Integers:
    """Draw up to ``size`` labels, stop when a label is exhausted; return the counts.

    Stopping there keeps the draws exact, and since it empties a label for all
    clients it happens at most once a label.
    """
    labels = generator.choice(len(weights), size=size, p=weights)
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    occurrence = np.arange(size) - np.searchsorted(ordered, ordered) + 1
    exhausting = order[occurrence == remaining[ordered]]
    num_drawn = int(exhausting.min()) + 1 if len(exhausting) else size
    return np.bincount(labels[:num_drawn], minlength=len(weights))


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


@dataclass(frozen=True)
class PartitionSpec:
    """A partition scheme in the catalogue; ``split`` takes its settings."""

    title: str
    summary: str
    settings_type: type[PartitionSettings]
    split: Callable[[Dataset, Any, RandomKey], Assignment]


def _by_labels(
    scheme: Callable[[Integers, Integers, Any, RandomKey], Assignment],
) -> Callable[[Dataset, Any, RandomKey], Assignment]:
    """Adapt a scheme that needs only labels to data sets."""
    return lambda data, settings, key: scheme(
        data.train.labels, data.test.labels, settings, key
    )


PARTITIONS: Mapping[str, PartitionSpec] = {
    "iid": PartitionSpec("IID", "equal random shares", IidSettings, _by_labels(iid)),
    "dirichlet": PartitionSpec(
        "Dirichlet",
        "each label spread over the clients by a Dirichlet draw (alpha)",
        DirichletSettings,
        _by_labels(dirichlet),
    ),
    "pathological": PartitionSpec(
        "Pathological",
        "each client has samples of exactly classes_per_client labels",
        PathologicalSettings,
        _by_labels(pathological),
    ),
    "pachinko": PartitionSpec(
        "Pachinko",
        "Dirichlet over coarse labels (alpha), then over fine labels (beta)",
        PachinkoSettings,
        lambda data, settings, key: pachinko(
            data.train.labels, data.test.labels, data.coarse_of, settings, key
        ),
    ),
    "natural": PartitionSpec(
        "Natural",
        "the clients that the data set names",
        NaturalSettings,
        lambda data, _settings, _key: natural(
            data.train.client_ids, data.test.client_ids, data.client_names
        ),
    ),
    "pflbed": PartitionSpec(
        "pFLBED",
        "clients of several domains; each is tested on all of its domain",
        PflbedSettings,
        pflbed,
    ),
}
