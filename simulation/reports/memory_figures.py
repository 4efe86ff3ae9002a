"""Images as the global model of a run sees them."""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from knnper.data.examples import Examples, LabelledArrays
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.prediction import KERNELS, KnnPredictor, interpolate
from knnper.datastore.store import UNNAMED, empty_memory_store, memory_store
from knnper.datastore.tuning import (
    Candidates,
    Queries,
    candidates,
    held_out,
    num_correct,
    score,
    weights_to_choose_from,
)
from knnper.errors import RunError
from knnper.experiment import (
    Experiment,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Settings,
    UnitInterval,
)
from knnper.loading import alternatives
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Integers, PartitionSettings
from knnper.simulation.partition.schemes import DirichletSettings, dirichlet
from knnper.simulation.partition.split import ClientPart
from knnper.simulation.reports.figure import (
    SOFT,
    Curve,
    FigureFolder,
    MemoryOptions,
    OnPart,
    PartRecord,
    accuracy_axis,
    correlation,
    curve_over,
    curve_rows,
    identity_of,
    plot_curves,
    styled,
)
from knnper.simulation.reports.tables import Chart, Shown, Table
from knnper.simulation.trained_model import TrainedModel
from knnper.strategies.core.memory import Apply, KnnSettings, remember
from knnper.strategies.core.predictors import evaluate


@dataclass(frozen=True, eq=False)
class Embedded:
    """n images, embedded.

    Attributes
    ----------
    embeddings
        φ(x), float32 of shape (n, p).
    probabilities
        The global model's, shape (n, c).
    labels
        int64, shape (n,).
    """

    embeddings: Tensor
    probabilities: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def slice(self, start: int, stop: int) -> "Embedded":
        """Return the images at ``start`` to ``stop``, less that."""
        return Embedded(
            self.embeddings[start:stop],
            self.probabilities[start:stop],
            self.labels[start:stop],
        )

    def at(self, positions: Integers) -> "Embedded":
        """Return the images at ``positions``, int64 of shape (m,)."""
        chosen = torch.from_numpy(positions)
        return Embedded(
            self.embeddings[chosen], self.probabilities[chosen], self.labels[chosen]
        )

    def followed_by(self, other: "Embedded") -> "Embedded":
        """Return these images and then ``other``'s."""
        return Embedded(
            torch.cat([self.embeddings, other.embeddings]),
            torch.cat([self.probabilities, other.probabilities]),
            torch.cat([self.labels, other.labels]),
        )

    def num_correct(self) -> int:
        """Return how many the global model gets right."""
        return int((self.probabilities.argmax(dim=1) == self.labels).sum())


@dataclass(frozen=True)
class Embedder:
    """Embeds images of a run's data set.

    Attributes
    ----------
    model
        The run's global model.
    """

    model: TrainedModel

    def train(self, indices: Integers) -> Embedded:
        """Return the images of the training split at ``indices``, shape (n,)."""
        return self._embedded(self.model.dataset.train, indices)

    def test(self, indices: Integers) -> Embedded:
        """Return the images of the test split at ``indices``, shape (n,)."""
        return self._embedded(self.model.dataset.test, indices)

    def train_in_parts(self, parts: Sequence[Integers]) -> Iterator[Embedded]:
        """Yield `train` of each part; embedded together, which is faster."""
        whole = self.train(np.concatenate(parts))
        start = 0
        for part in parts:
            yield whole.slice(start, start + len(part))
            start += len(part)

    def _embedded(self, split: LabelledArrays, indices: Integers) -> Embedded:
        examples = split.examples_at(indices)
        embeddings = self.model.embed(examples.images)
        return Embedded(embeddings, self.model.head(embeddings), examples.labels)


def knn_settings(experiment: Experiment) -> KnnSettings:
    """Return the run's own settings of kNN-Per, or the default ones."""
    chosen = experiment.personalization.settings
    return chosen if isinstance(chosen, KnnSettings) else KnnSettings()


def num_correct_(
    local: Tensor, global_probabilities: Tensor, labels: Tensor, knn_weight: float
) -> int:
    """Return how many labels (n,) the mixture of two predictions (n, c) gets right."""
    mixed = interpolate(local, global_probabilities, knn_weight)
    return int((mixed.argmax(dim=1) == labels).sum())


@dataclass(frozen=True, eq=False)
class Newcomer:
    """A new client's images, embedded.

    Attributes
    ----------
    known
        n_m images to learn from, in random order: with a smaller memory it has the
        first of them.
    test
        Its test images.
    """

    known: Embedded
    test: Embedded


@dataclass(frozen=True, eq=False)
class NewcomerPool:
    """The images of all clients that took no part in training, to be dealt anew.

    Attributes
    ----------
    model
        Embeds each of them once, when the first deal is made.
    """

    model: TrainedModel

    @cached_property
    def known(self) -> Embedded:
        """Their training and validation images, which the model was not trained on."""
        return Embedder(self.model).train(
            _joined(
                [
                    *(one.train for one in self._parts),
                    *(one.validation for one in self._parts),
                ]
            )
        )

    @cached_property
    def test(self) -> Embedded:
        """Their test images."""
        return Embedder(self.model).test(_joined([part.test for part in self._parts]))

    @property
    def num_clients(self) -> int:
        """Clients that took no part in training."""
        return len(self._parts)

    @property
    def num_known(self) -> int:
        """Their training and validation images."""
        return sum(len(part.train) + len(part.validation) for part in self._parts)

    def require_clients(self, num_clients: int) -> None:
        """Refuse more new clients than there are images for.

        Raises
        ------
        RunError
            If all clients took part in training, those that did not have no test
            images, or some new ones would have nothing.
        """
        if self.num_clients == 0:
            raise RunError(
                "all clients took part in training, expected some that did not, whose "
                "images new clients get; run with --set partition.unseen_fraction=0.2"
            )
        if all(len(part.test) == 0 for part in self._parts):
            raise RunError(
                f"found no test images at the {self.num_clients} unseen clients; run "
                "with a larger partition.unseen_fraction"
            )
        if num_clients > self.num_known:
            raise RunError(
                f"found {num_clients} clients, expected at most {self.num_known}, the "
                "training images of the unseen clients; give fewer --clients"
            )

    def deal(
        self, num_clients: int, alpha: float, key: RandomKey
    ) -> tuple[Newcomer, ...]:
        """Deal all images to new clients, each label by a Dirichlet draw.

        Parameters
        ----------
        num_clients
            M.
        alpha
            α of the draws.
        key
            Fixes every random choice.
        """
        settings = DirichletSettings(num_clients=num_clients, alpha=alpha)
        labels = self.known.labels.numpy(), self.test.labels.numpy()
        dealt = dirichlet(*labels, settings, key.child("deal"))
        return tuple(
            Newcomer(
                self.known.at(key.child("order", number).numpy().permutation(known)),
                self.test.at(test),
            )
            for number, (known, test) in enumerate(
                zip(dealt.train, dealt.test, strict=True)
            )
        )

    @property
    def _parts(self) -> tuple[ClientPart, ...]:
        clients = self.model.partition.clients
        return tuple(client for client in clients if not client.seen)


def _joined(parts: list[Integers]) -> Integers:
    """Return each index once, ascending: clients may share test images."""
    return np.unique(np.concatenate(parts))


_TENTHS = tuple(number / 10 for number in range(11))

_PAPER_SIZES = (1 / 50, 1 / 10, 2 / 5, 1.0)
"""Of the 250 images that a client of the paper has on average: 5, 25, 100 and 250."""


@dataclass(frozen=True)
class MemorySettings(Settings):
    """Who the new clients are, and which points are shown; the paper's by default.

    Attributes
    ----------
    num_clients
        M, of each deal.
    sizes
        Images that a client has on average, in the figure of λ.
    alpha
        α of all figures but the first.
    alphas
        α of the first figure, that of the capacity.
    num_deals
        How often the images are dealt anew; what points vary by.
    capacities
        Memory of a client as a fraction of the images it has.
    knn_weights
        λ, the same for all clients, where a figure has it on an axis.
    num_neighbors
        k.
    kernel_scales
        σ.
    imbalances
        ΔC, [0, 0.5].
    validation_fraction
        Part of its images on which a client chooses.
    knn
        k, kernel, σ, and how a client chooses its λ.
    """

    num_clients: PositiveInt
    sizes: tuple[PositiveInt, ...]
    alpha: PositiveFloat = 0.3
    alphas: tuple[PositiveFloat, ...] = MemoryOptions.alpha
    num_deals: PositiveInt = MemoryOptions.deals
    capacities: tuple[UnitInterval, ...] = _TENTHS
    knn_weights: tuple[UnitInterval, ...] = _TENTHS
    num_neighbors: tuple[PositiveInt, ...] = (1, 3, 5, 7, 10, 12, 14, 16)
    kernel_scales: tuple[PositiveFloat, ...] = (0.01, 0.03, 0.1, 1.0, 10.0, 100.0)
    imbalances: tuple[Annotated[float, Field(ge=0, le=0.5)], ...] = _TENTHS[:6]
    validation_fraction: ProperFraction = 0.2
    knn: KnnSettings = field(default_factory=KnnSettings)


def paper_sizes(mean_size: float) -> tuple[int, ...]:
    """Return the paper's average sizes, 5, 25, 100 and 250 of 250.

    For clients with another average, the same fractions of it, one image at least.
    """
    scaled = {max(1, round(fraction * mean_size)) for fraction in _PAPER_SIZES}
    return tuple(sorted(scaled))


def memory_settings(model: TrainedModel, options: MemoryOptions) -> MemorySettings:
    """Return the settings of the figures; what is not chosen follows the run.

    Parameters
    ----------
    model
        Its new clients are as many as took no part in training, with the run's α where
        it has one; they choose on as large a part of their images, with the run's k,
        kernel and σ.
    options
        What is chosen.
    """
    partition = model.experiment.partition.settings
    pool = NewcomerPool(model)
    num_clients = options.clients or max(pool.num_clients, 1)
    default = MemorySettings(
        num_clients,
        options.size or paper_sizes(pool.num_known / num_clients),
        alphas=options.alpha,
        num_deals=options.deals,
        knn=knn_settings(model.experiment),
    )
    return replace(
        default,
        alpha=partition.alpha
        if isinstance(partition, DirichletSettings)
        else default.alpha,
        validation_fraction=partition.validation_fraction
        if isinstance(partition, PartitionSettings)
        else default.validation_fraction,
    )


@dataclass(frozen=True, eq=False)
class Rememberer:
    """How new clients use their memory. It keeps all that a client has.

    Attributes
    ----------
    head
        From representations (n, p) to the global model's probabilities (n, c).
    knn
        k, kernel, σ, the grid of λ, and how to choose from it.
    validation_fraction
        Part of its images on which a client chooses, [0, 1).
    """

    head: Apply
    knn: KnnSettings
    validation_fraction: float

    def predictor(self, client: Newcomer, num_known: int) -> KnnPredictor:
        """Return what a client serves that has the first ``num_known`` of its images.

        λ is chosen on a part of them with the rest in the store, then all are stored:
        as `knnper.strategies.knn_per.memorize` does. Test images are not looked at. The
        predictor takes embeddings (n, p) in place of images.
        """
        known = client.known.slice(0, num_known)
        held = self._num_held_out(num_known)
        num_classes, dim = known.probabilities.shape[1], known.embeddings.shape[1]
        store = empty_memory_store(StoreSpec(num_classes), dim, UNNAMED)
        tuned = remember(
            store,
            _examples(known.slice(held, num_known)),
            _examples(known.slice(0, held)),
            self.head,
            self.knn,
        )
        return tuned.predictor(_as_it_is, self.head, store, self.knn)

    def _num_held_out(self, num_known: int) -> int:
        """Return how many are held out; some are left to be looked up."""
        count = int(self.validation_fraction * num_known + 0.5)
        return min(count, max(num_known - 1, 0))


def count_correct(predictor: KnnPredictor, client: Newcomer) -> int:
    """Return how many of a client's test images its predictor gets right."""
    test = client.test
    return evaluate(predictor, Examples(test.embeddings, test.labels)).num_correct


def count_correct_with_each(
    client: Newcomer, num_known: int, knn: KnnSettings, choices: Candidates
) -> Tensor:
    """Return how many test images are right with each λ, k and σ: a curve, no choice.

    Parameters
    ----------
    client
        With all of its first ``num_known`` images in the store; with none it serves
        the global model, whatever λ is.
    num_known
        n.
    knn
        Gives the kernel.
    choices
        The values of λ, k and σ.

    Returns
    -------
    Tensor
        float64, of the choices' `shape`.
    """
    known, test = client.known.slice(0, num_known), client.test
    if num_known == 0:
        return torch.full(choices.shape, test.num_correct(), dtype=torch.float64)
    store = memory_store(known.embeddings, known.labels, known.probabilities.shape[1])
    queries = Queries(test.embeddings, test.probabilities, test.labels)
    evidence = held_out(store, queries, max(choices.num_neighbors))
    return score(evidence, choices, KERNELS[knn.kernel], num_correct)


def size_at(num_known: int, capacity: float) -> int:
    """Return the images that fit: the nearest whole number, and all of them at most.

    Parameters
    ----------
    num_known
        n_m, all that the client has.
    capacity
        As a fraction of it, not negative.
    """
    return min(num_known, int(capacity * num_known + 0.5))


def _examples(embedded: Embedded) -> NewExamples:
    return NewExamples(embedded.embeddings, embedded.labels)


def _as_it_is(embeddings: Tensor) -> Tensor:
    return embeddings


Records = Mapping[float, Sequence[PartRecord]]
"""By alpha, what was measured in each deal."""


@dataclass(frozen=True, eq=False)
class Deal:
    """New clients, and how they remember.

    Attributes
    ----------
    clients
        With some images each, or none.
    rememberer
        What they serve.
    settings
        Which points are shown.
    """

    clients: Sequence[Newcomer]
    rememberer: Rememberer
    settings: MemorySettings

    @property
    def num_test(self) -> int:
        """Test images of all clients."""
        return sum(len(client.test) for client in self.clients)

    @property
    def mean_size(self) -> float:
        """Images that a client has to learn from, on average."""
        return sum(len(client.known) for client in self.clients) / len(self.clients)

    def with_neighbors(self, num_neighbors: int) -> "Deal":
        """Return the same clients with this k, which none of them chooses."""
        knn = self.rememberer.knn
        fixed = replace(
            knn,
            num_neighbors=num_neighbors,
            tuning=replace(knn.tuning, num_neighbors_grid=()),
        )
        return replace(self, rememberer=replace(self.rememberer, knn=fixed))

    def accuracy(self, num_correct: float) -> float:
        """Return the part of all test images that is right."""
        return num_correct / self.num_test


@dataclass(frozen=True)
class Panel:
    """One figure of the memory.

    Attributes
    ----------
    name
        Of its files.
    title
        What it shows.
    line_name, x_name, y_name
        Columns of the table: what a line is of, and the axes.
    legend
        What a line is of, for people.
    x_label, y_label
        Of the axes.
    measure
        ``deal -> record``: what one deal shows, plain values.
    curves
        ``(records, settings) -> curves``.
    alphas
        ``settings -> α`` of its deals.
    log_x
        Whether the horizontal axis is logarithmic.
    correlations
        ``(records, settings) -> {line: correlation of the axes}``, where that is of
        interest.
    """

    name: str
    title: str
    line_name: str
    x_name: str
    x_label: str
    legend: str
    measure: Callable[[Deal], PartRecord]
    curves: Callable[[Records, MemorySettings], Sequence[Curve]]
    y_name: str = "accuracy"
    y_label: str = "test accuracy"
    alphas: Callable[[MemorySettings], tuple[float, ...]] = lambda one: (one.alpha,)
    log_x: bool = False
    correlations: Callable[[Records, MemorySettings], Mapping[str, float | None]] = (
        lambda *_: {}
    )


def at_capacity(deal: Deal, capacity: float) -> PartRecord:
    """Return what `at_sizes` does of clients that have that part of their images."""
    return at_sizes(deal, lambda num_known: size_at(num_known, capacity))


def at_sizes(deal: Deal, size_of: Callable[[int], int]) -> PartRecord:
    """Return how the clients do, each with some of its images.

    λ is chosen by each client on these images.

    Parameters
    ----------
    deal
        The clients.
    size_of
        ``n_m -> size``: how many of all its images a client has.

    Returns
    -------
    Mapping
        ``accuracy``, of all test images; ``num_stored``, of all clients together;
        ``knn_weight``, the mean λ of the clients.
    """
    correct, stored, weights = 0, 0, []
    for client in deal.clients:
        num_known = size_of(len(client.known))
        predictor = deal.rememberer.predictor(client, num_known)
        correct += count_correct(predictor, client)
        stored += num_known
        weights.append(predictor.effective_knn_weight)
    return {
        "accuracy": deal.accuracy(correct),
        "num_stored": stored,
        "knn_weight": statistics.fmean(weights),
    }


def column(points: Sequence[PartRecord], name: str) -> list[float]:
    """Return one figure of each point."""
    return [point[name] for point in points]


def curve_of(
    label: str, places: Sequence[float], deals: Sequence[Sequence[PartRecord]]
) -> Curve:
    """Return the accuracies of several deals, the points of `at_capacity` each."""

    def mean(name: str) -> list[float]:
        values = zip(*(column(points, name) for points in deals), strict=True)
        return [statistics.fmean(one) for one in values]

    details = {
        "num_stored": mean("num_stored"),
        "knn_weight": mean("knn_weight"),
    }
    return curve_over(
        label, places, [column(one, "accuracy") for one in deals], details
    )


def accuracies(deal: Deal, capacity: float, choices: Candidates) -> Tensor:
    """Return the accuracy with each λ, k and σ, float64 of the choices' `shape`.

    Parameters
    ----------
    deal
        Clients whose memory holds a part of their images.
    capacity
        That part.
    choices
        The values of λ, k and σ.
    """
    correct = torch.zeros(choices.shape, dtype=torch.float64)
    for client in deal.clients:
        num_known = size_at(len(client.known), capacity)
        correct += count_correct_with_each(
            client, num_known, deal.rememberer.knn, choices
        )
    return correct / deal.num_test


def curves_by_knn_weight(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    """Return the curves of records ``{"lines": {label: accuracy by λ}}``."""
    (deals,) = records.values()
    weights = weights_to_choose_from(settings.knn_weights)
    return [
        curve_over(label, weights, [record["lines"][label] for record in deals])
        for label in deals[0]["lines"]
    ]


def lines_of(lines: Sequence[tuple[str, Tensor]]) -> PartRecord:
    """Return the record of labelled accuracies by λ, each of shape (l,)."""
    return {"lines": {label: values.tolist() for label, values in lines}}


Weights = Sequence[float]

Points = Sequence[PartRecord]


def _measure(deal: Deal) -> PartRecord:
    """Return of each client and capacity the λ chosen, and what each λ gets right."""
    return {"points": list(_points(deal))}


def _points(deal: Deal) -> Iterator[PartRecord]:
    knn = deal.rememberer.knn
    choices = candidates(knn.knn_weights, (knn.num_neighbors,), (knn.kernel_scale,))
    for client in deal.clients:
        sizes = {size_at(len(client.known), one) for one in deal.settings.capacities}
        # Without stored or test images no λ is better than another.
        for size in sorted(sizes - {0}) if len(client.test) > 0 else ():
            correct = count_correct_with_each(client, size, knn, choices)
            yield {
                "size": size,
                "chosen": deal.rememberer.predictor(client, size).effective_knn_weight,
                "correct": [int(one) for one in correct.flatten()],
            }


def _chosen(weights: Weights, points: Points) -> float:  # noqa: ARG001
    return statistics.fmean(point["chosen"] for point in points)


def _best_of_each(weights: Weights, points: Points) -> float:
    # argmax returns the first of several largest.
    return statistics.fmean(weights[int(np.argmax(one["correct"]))] for one in points)


def _best_together(weights: Weights, points: Points) -> float:
    right = np.sum([point["correct"] for point in points], axis=0)
    return weights[int(np.argmax(right))]


_OF_EACH: Mapping[str, Callable[[Weights, Points], float]] = {
    "chosen by the client": _chosen,
    "λ_opt, best on its test images (the paper's)": _best_of_each,
}

_LINES = {
    **_OF_EACH,
    "best on the test images of all of that size": _best_together,
}


def _curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    by_size = [_by_size(record["points"]) for record in deals]
    weights = weights_to_choose_from(settings.knn.knn_weights)
    return [
        _curve(label, by_size, partial(line, weights)) for label, line in _LINES.items()
    ]


def _by_size(points: Points) -> Mapping[int, Points]:
    """Return the points by the power of two that is not above their size."""
    found: dict[int, list[PartRecord]] = defaultdict(list)
    for point in points:
        found[2 ** math.floor(math.log2(point["size"]))].append(point)
    return found


def _curve(
    label: str,
    deals: Sequence[Mapping[int, Points]],
    line: Callable[[Points], float],
) -> Curve:
    """Return λ by size; very small and large sizes are not in every deal."""
    sizes = sorted({size for deal in deals for size in deal})
    found = [[line(deal[size]) for deal in deals if size in deal] for size in sizes]
    counts = [sum(len(deal.get(size, ())) for deal in deals) for size in sizes]
    return Curve(
        label,
        tuple(sizes),
        tuple(statistics.fmean(one) for one in found),
        tuple(statistics.stdev(one) if len(one) > 1 else None for one in found),
        {"num_points": counts},
    )


def _correlations(
    records: Records, settings: MemorySettings
) -> Mapping[str, float | None]:
    """Return how the λ of each point goes with the logarithm of its size."""
    points = [
        point for deals in records.values() for one in deals for point in one["points"]
    ]
    weights = weights_to_choose_from(settings.knn.knn_weights)
    sizes = [math.log(point["size"]) for point in points]
    return {
        label: correlation(sizes, [line(weights, [point]) for point in points])
        for label, line in _OF_EACH.items()
    }


PANEL = Panel(
    name="best-weight",
    title="λ by the images that a client stores (Figure 8)",
    line_name="kind",
    x_name="num_stored_from",
    x_label="stored images: so many, and less than twice as many",
    legend="λ",
    measure=_measure,
    curves=_curves,
    y_name="knn_weight",
    y_label="λ",
    log_x=True,
    correlations=_correlations,
)


def _capacity_measure(deal: Deal) -> PartRecord:
    return {"points": [at_capacity(deal, one) for one in deal.settings.capacities]}


def _capacity_curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    return [
        curve_of(
            f"{alpha:g}", settings.capacities, [record["points"] for record in deals]
        )
        for alpha, deals in records.items()
    ]


CAPACITY_PANEL = Panel(
    name="capacity",
    title="Memory of new clients (Figure 1)",
    line_name="alpha",
    x_name="capacity",
    x_label="capacity, as a fraction of the client's images",
    legend=r"$\alpha$",
    measure=_capacity_measure,
    curves=_capacity_curves,
    alphas=lambda settings: settings.alphas,
)


_LABELS = {"weak": "weak", "strong": "strong", "all": "average"}
"""Of each group of clients, the name of its line: the paper's."""


def _hardware_measure(deal: Deal) -> PartRecord:
    imbalances = deal.settings.imbalances
    weak = [at_sizes(deal, partial(_weak_size, one)) for one in imbalances]
    strong = [at_sizes(deal, partial(_strong_size, one)) for one in imbalances]
    both = [_mean(*pair) for pair in zip(weak, strong, strict=True)]
    return dict(zip(_LABELS, (weak, strong, both), strict=True))


def _strong_size(imbalance: float, num_known: int) -> int:
    return size_at(num_known, 0.5 + imbalance)


def _weak_size(imbalance: float, num_known: int) -> int:
    # What is left, not ½ - ΔC rounded by itself: the memory of all never changes.
    return num_known - _strong_size(imbalance, num_known)


def _mean(weak: PartRecord, strong: PartRecord) -> PartRecord:
    return {name: (weak[name] + strong[name]) / 2 for name in weak}


def _hardware_curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    return [
        curve_of(label, settings.imbalances, [record[group] for record in deals])
        for group, label in _LABELS.items()
    ]


HARDWARE_PANEL = Panel(
    name="hardware",
    title="Weak and strong clients (Figure 9)",
    line_name="clients",
    x_name="imbalance",
    x_label="ΔC: capacity is ½ - ΔC of weak clients, ½ + ΔC of strong ones",
    legend="clients",
    measure=_hardware_measure,
    curves=_hardware_curves,
)


def _kernel_scale_measure(deal: Deal) -> PartRecord:
    knn, settings = deal.rememberer.knn, deal.settings
    choices = candidates(
        settings.knn_weights, (knn.num_neighbors,), settings.kernel_scales
    )
    found = accuracies(deal, 1.0, choices)
    return lines_of(
        [
            (f"{scale:g}", found[:, 0, place])
            for place, scale in reversed(list(enumerate(choices.kernel_scales)))
        ]
    )


KERNEL_SCALE_PANEL = Panel(
    name="kernel-scale",
    title="λ of all clients, by the scale of the kernel (Figure 7)",
    line_name="kernel_scale",
    x_name="knn_weight",
    x_label="λ (0: global model alone, 1: neighbours alone)",
    legend=r"$\sigma$",
    measure=_kernel_scale_measure,
    curves=curves_by_knn_weight,
)


_CHOSEN, _ALONE = "λ chosen by each client", "neighbours alone (λ = 1)"


def _neighbors_measure(deal: Deal) -> PartRecord:
    scale = (deal.rememberer.knn.kernel_scale,)
    alone = candidates((1.0,), deal.settings.num_neighbors, scale)
    return {
        "chosen": [
            at_capacity(deal.with_neighbors(count), 1.0)["accuracy"]
            for count in alone.num_neighbors
        ],
        "alone": accuracies(deal, 1.0, alone)[0, :, 0].tolist(),
    }


def _neighbors_curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    places = sorted(set(settings.num_neighbors))
    return [
        curve_over(label, places, [record[name] for record in deals])
        for label, name in ((_CHOSEN, "chosen"), (_ALONE, "alone"))
    ]


NEIGHBORS_PANEL = Panel(
    name="neighbors",
    title="Number of neighbours (Figure 5)",
    line_name="kind",
    x_name="num_neighbors",
    x_label="neighbours, k",
    legend="kNN-Per",
    measure=_neighbors_measure,
    curves=_neighbors_curves,
)


_LONG_LABEL = 20
"""Characters, from which labels have a line each."""


@styled
def picture(panel: Panel, curves: Sequence[Curve], global_accuracy: float) -> Figure:
    """Return the curves of a figure, with the global model's accuracy beside them."""
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    plot_curves(axes, curves)
    axes.set_xlabel(panel.x_label)
    axes.set_title(panel.title)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves[0].x, [f"{place:g}" for place in curves[0].x])
    if panel.y_name == "accuracy":
        accuracy_axis(axes, panel.y_label)
        axes.axhline(
            global_accuracy, color=SOFT.light, linestyle=":", label="global model"
        )
    else:
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
    _add_legend(figure, panel.legend)
    return figure


def _add_legend(figure: Figure, title: str) -> None:
    """Put the legend below the curves: inside it would hide the steepest."""
    (axes,) = figure.axes
    _, labels = axes.get_legend_handles_labels()
    long = any(len(label) > _LONG_LABEL for label in labels)
    figure.legend(
        title=title,
        loc="outside lower center",
        ncols=1 if long else 4,
        fontsize="small",
    )


def _sizes_measure(deal: Deal) -> PartRecord:
    knn, settings = deal.rememberer.knn, deal.settings
    choices = candidates(
        settings.knn_weights, (knn.num_neighbors,), (knn.kernel_scale,)
    )
    return lines_of(
        [
            (str(size), accuracies(deal, size / deal.mean_size, choices)[:, 0, 0])
            for size in settings.sizes
        ]
    )


SIZES_PANEL = Panel(
    name="knn-weight",
    title="λ of all clients, by the images that a client has (Figure 2)",
    line_name="mean_num_stored",
    x_name="knn_weight",
    x_label="λ (0: global model alone, 1: neighbours alone)",
    legend="images, on average",
    measure=_sizes_measure,
    curves=curves_by_knn_weight,
)


PANELS: Mapping[str, Panel] = MappingProxyType(
    {
        panel.name: panel
        for panel in (
            CAPACITY_PANEL,
            SIZES_PANEL,
            NEIGHBORS_PANEL,
            KERNEL_SCALE_PANEL,
            PANEL,
            HARDWARE_PANEL,
        )
    }
)


_FACTS = ("num_test", "mean_size", "global_accuracy")


@dataclass(frozen=True)
class PanelCurves:
    """The numbers of one figure of the memory.

    Attributes
    ----------
    curves
        Its lines.
    global_accuracy
        What the global model does without any memory.
    """

    curves: Sequence[Curve]
    global_accuracy: float


def write_panel(
    folder: FigureFolder,
    identity: Mapping[str, Any],
    panel: Panel,
    settings: MemorySettings,
    measured: Sequence[PartRecord],
) -> PanelCurves:
    """Write .csv, .png, .svg, .pdf and .json of a figure; return its curves.

    Parameters
    ----------
    folder
        Where to.
    identity
        What the numbers depend on; see `knnper.simulation.reports.figure.identity_of`.
    panel
        The figure.
    settings
        Which points it shows.
    measured
        The record of each of its deals.
    """
    by_alpha = _by_alpha(measured)
    curves = panel.curves(by_alpha, settings)
    header = (panel.line_name, panel.x_name, panel.y_name, f"{panel.y_name}_std")
    rows = curve_rows(curves)
    folder.write_csv(f"{panel.name}.csv", (*header, *curves[0].details), rows)
    global_accuracy = measured[0]["global_accuracy"]
    folder.write_pictures(panel.name, picture(panel, curves, global_accuracy))
    details = {
        "title": panel.title,
        **{name: measured[0][name] for name in _FACTS},
        "correlations": panel.correlations(by_alpha, settings),
        "curves": [curve.as_record() for curve in curves],
    }
    described = {**identity, "figure": panel.name}
    folder.write_description(described, measured, details)
    return PanelCurves(curves, global_accuracy)


def _by_alpha(measured: Sequence[PartRecord]) -> Records:
    found: dict[float, list[PartRecord]] = {}
    for record in measured:
        found.setdefault(record["alpha"], []).append(record)
    return found


NAME = "memory"


def show_memory(
    model: TrainedModel, output: Path, options: MemoryOptions, on_part: OnPart
) -> Shown:
    """Make figures of the memory as `draw_memory` does; return what they show."""
    settings = memory_settings(model, options)
    found = draw_memory(model, output, settings, options.seed, options.only, on_part)
    return Shown(
        tuple(_table(PANELS[name], one.curves) for name, one in found.items()),
        tuple(_chart(PANELS[name], one) for name, one in found.items()),
    )


def _table(panel: Panel, curves: Sequence[Curve]) -> Table:
    return Table(
        panel.title,
        (panel.line_name, *(f"{place:g}" for place in curves[0].x)),
        tuple((one.label, *(f"{mean:.3f}" for mean in one.mean)) for one in curves),
    )


def _chart(panel: Panel, found: PanelCurves) -> Chart:
    draw = functools.partial(picture, panel, found.curves, found.global_accuracy)
    return Chart(panel.name, panel.title, draw)


def draw_memory(
    model: TrainedModel,
    output: Path,
    settings: MemorySettings,
    seed: int,
    names: Sequence[str],
    on_part: OnPart,
) -> Mapping[str, PanelCurves]:
    """Make figures in the folder ``output``; go on with them where they were left.

    Writes .csv, .png, .svg, .pdf and .json of each.

    Parameters
    ----------
    model
        The global model, of a run with clients that took no part in training.
    output
        The folder; others of these figures may be there.
    settings
        What is shown.
    seed
        Fixes every random choice.
    names
        Of `PANELS`.
    on_part
        Is told of every deal that is done.

    Returns
    -------
    Mapping
        The curves of each figure, by its name.

    Raises
    ------
    RunError
        If a name is unknown, there are no new clients or too few images for them, or
        the folder holds something else.
    """
    panels = [_panel(name) for name in dict.fromkeys(names)]
    pool = NewcomerPool(model)
    pool.require_clients(settings.num_clients)
    identity = identity_of(NAME, model, settings, seed)
    parts = {part.name: part for panel in panels for part in _parts(panel, settings)}
    dealer = _Dealer(pool, settings, RandomKey(seed).child(NAME))
    with FigureFolder.open(output, identity) as folder:
        records = folder.finish(
            list(parts), lambda name: dealer.measure(parts[name]), on_part
        )
        found = dict(zip(parts.values(), records, strict=True))
        return {
            panel.name: write_panel(
                folder,
                identity,
                panel,
                settings,
                [record for part, record in found.items() if part.panel is panel],
            )
            for panel in panels
        }


def _panel(name: str) -> Panel:
    if name not in PANELS:
        known = alternatives(name, PANELS)
        raise RunError(f"found no figure {name!r} of the memory; {known}")
    return PANELS[name]


@dataclass(frozen=True)
class _Part:
    """What one deal shows in one figure."""

    panel: Panel
    alpha: float
    number: int

    @property
    def name(self) -> str:
        return f"{self.panel.name}, alpha {self.alpha:g}, deal {self.number}"


def _parts(panel: Panel, settings: MemorySettings) -> Iterator[_Part]:
    for alpha in dict.fromkeys(panel.alphas(settings)):
        for number in range(1, settings.num_deals + 1):
            yield _Part(panel, alpha, number)


@dataclass(frozen=True, eq=False)
class _Dealer:
    """Deals the images of the unseen clients, and measures."""

    pool: NewcomerPool
    settings: MemorySettings
    key: RandomKey

    def measure(self, part: _Part) -> PartRecord:
        # All figures have the same deals, so that they can be compared.
        key = self.key.child("deal", part.number, f"{part.alpha:g}")
        clients = self.pool.deal(self.settings.num_clients, part.alpha, key)
        rememberer = Rememberer(
            self.pool.model.head, self.settings.knn, self.settings.validation_fraction
        )
        deal = Deal(clients, rememberer, self.settings)
        test = self.pool.test
        return {
            "alpha": part.alpha,
            "num_test": len(test),
            "mean_size": deal.mean_size,
            "global_accuracy": deal.accuracy(test.num_correct()),
            **part.panel.measure(deal),
        }
