"""The memory of new clients: Marfoq et al. 2022, Figures 1, 2, 5, 7, 8 and 9.

The images of the clients that took no part in training are repeatedly partitioned among
new clients; the global model does not change.
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from knnper import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RandomKey,
    Settings,
    UnitInterval,
)
from knnper.datastore.tuning import ParameterGrid, knn_weight_grid
from knnper.simulation.partition.dirichlet import DirichletSettings
from knnper.simulation.reports.figure import SOFT, accuracy_axis, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.trained_model import TrainedModel
from papers.curves import (
    FigureCurve,
    correlation,
    curve_of,
    curve_over,
    curve_rows,
    plot_curves,
)
from papers.figures import Drawing, FigureFolder, PartRecord
from papers.new_clients import (
    NewClient,
    NewClientService,
    UnseenImages,
    count_correct,
    count_correct_with_each,
    size_at,
)

PanelName = Literal[
    "capacity", "knn-weight", "neighbors", "kernel-scale", "best-weight", "hardware"
]
_SOME = Field(min_length=1)
_TENTHS = tuple(number / 10 for number in range(11))
RecordsByAlpha = Mapping[float, Sequence[PartRecord]]  # one per partition
_KINDS = {"chosen": "λ chosen by each client", "alone": "neighbours alone (λ = 1)"}
_GROUPS = {"weak": "weak", "strong": "strong", "all": "average"}
Points = Sequence[PartRecord]
_WEIGHT_AXIS = "λ (0: global model alone, 1: neighbours alone)"
_LONG_LABEL = 20  # characters; longer labels are put on separate lines


@dataclass(frozen=True)
class MemorySettings(Settings):
    """Settings of the figures; the defaults are the paper's points.

    Attributes
    ----------
    only
        Names of the figures to draw.
    clients
        M, the number of new clients; null is the number of unseen clients of the run.
    alpha
        α of the lines of ``capacity``; the other figures use the run's α.
    size
        Mean number of images of a client in ``knn-weight``; if empty, 1/50, 1/10, 2/5
        and all of its images.
    partitions
        Number of partitions; points show mean and deviation over them.
    seed
        Seed of every random choice.
    capacities
        Size of a client's memory as a fraction of its images.
    knn_weights
        Values of λ, the same for all clients, on the axis of a figure.
    num_neighbors
        k.
    kernel_scales
        σ.
    imbalances
        ΔC, [0, 0.5].
    """

    only: Annotated[tuple[PanelName, ...], _SOME] = get_args(PanelName)
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], _SOME] = (0.1, 0.3, 0.5, 0.7, 1.0)
    size: tuple[PositiveInt, ...] = ()
    partitions: PositiveInt = 3
    seed: NonNegativeInt = 0
    capacities: tuple[UnitInterval, ...] = _TENTHS
    knn_weights: tuple[UnitInterval, ...] = _TENTHS
    num_neighbors: tuple[PositiveInt, ...] = (1, 3, 5, 7, 10, 12, 14, 16)
    kernel_scales: tuple[PositiveFloat, ...] = (0.01, 0.03, 0.1, 1.0, 10.0, 100.0)
    imbalances: tuple[Annotated[float, Field(ge=0, le=0.5)], ...] = _TENTHS[:6]


@dataclass(frozen=True, eq=False)
class Population:
    """New clients and the measurements of them."""

    clients: Sequence[NewClient]
    service: NewClientService
    settings: MemorySettings

    @property
    def mean_size(self) -> float:
        """Mean number of known images per client."""
        return sum(len(client.known) for client in self.clients) / len(self.clients)

    def with_neighbors(self, num_neighbors: int) -> "Population":
        """Return the same clients with a fixed k."""
        knn = self.service.knn
        tuning = replace(knn.tuning, num_neighbors_grid=())
        knn = replace(knn, num_neighbors=num_neighbors, tuning=tuning)
        return replace(self, service=replace(self.service, knn=knn))

    def accuracy(self, num_correct: float) -> float:
        """Return the fraction of correct test images over all clients."""
        return num_correct / sum(len(client.test) for client in self.clients)

    def at_capacity(self, capacity: float) -> PartRecord:
        """Measure clients that have this fraction of their images; see `at_sizes`."""
        return self.at_sizes(lambda num_known: size_at(num_known, capacity))

    def at_sizes(self, size_of: Callable[[int], int]) -> PartRecord:
        """Measure clients that know ``size_of(n_m)`` images and choose λ on them."""
        correct, stored, weights = 0, 0, []
        for client in self.clients:
            num_known = size_of(len(client.known))
            predictor = self.service.predictor(client, num_known)
            correct += count_correct(predictor, client)
            stored += num_known
            weights.append(predictor.effective_knn_weight)
        return {
            "accuracy": self.accuracy(correct),
            "num_stored": stored,
            "knn_weight": statistics.fmean(weights),
        }

    def accuracies(
        self,
        capacity: float = 1.0,
        knn_weights: Sequence[float] | None = None,
        num_neighbors: Sequence[int] | None = None,
        kernel_scales: Sequence[float] | None = None,
    ) -> Tensor:
        """Compute the accuracy for each λ, k and σ, float64 of shape (l, k, s)."""
        knn = self.service.knn
        correct = torch.zeros((), dtype=torch.float64)
        choices = ParameterGrid.of(
            self.settings.knn_weights if knn_weights is None else knn_weights,
            num_neighbors or (knn.num_neighbors,),
            kernel_scales or (knn.kernel_scale,),
        )
        for client in self.clients:
            num_known = size_at(len(client.known), capacity)
            correct = correct + count_correct_with_each(client, num_known, knn, choices)
        return correct / sum(len(client.test) for client in self.clients)


@dataclass(frozen=True)
class Panel:
    """One figure of the memory."""

    title: str
    legend: str
    x_label: str
    columns: tuple[str, str, str]  # of the table: label of lines, and the two axes
    measure: Callable[[Population], PartRecord]
    curves: Callable[[RecordsByAlpha, MemorySettings], Sequence[FigureCurve]]
    # From the run's α to the values of α of the figure.
    alphas: Callable[[float, MemorySettings], Sequence[float]] = lambda alpha, _: (
        alpha,
    )
    log_x: bool = False
    # Correlations of the two axes by line, for some figures.
    correlations: Callable[[RecordsByAlpha], Mapping[str, float | None]] = lambda _: {}


def _only(records: RecordsByAlpha) -> Sequence[PartRecord]:
    (records_of_part,) = records.values()
    return records_of_part


def _curve_of_points(
    label: str, places: Sequence[float], runs: Sequence[Sequence[PartRecord]]
) -> FigureCurve:
    """Return the curves of several populations, from the points of `at_sizes`."""

    def columns(name: str) -> list[list[float]]:
        return [[point[name] for point in points] for points in zip(*runs, strict=True)]

    details = {
        name: list(map(statistics.fmean, columns(name)))
        for name in ("num_stored", "knn_weight")
    }
    return curve_of(label, places, columns("accuracy"), details)


def _curves_by_weight(
    records: RecordsByAlpha, settings: MemorySettings
) -> Sequence[FigureCurve]:
    """Return the curves of records ``{label: accuracy by λ}``."""
    records_of_part = _only(records)
    weights = knn_weight_grid(settings.knn_weights)
    return [
        curve_over(
            label, weights, [record["lines"][label] for record in records_of_part]
        )
        for label in records_of_part[0]["lines"]
    ]


def _capacity_points(population: Population) -> PartRecord:
    capacities = population.settings.capacities
    return {"points": [population.at_capacity(capacity) for capacity in capacities]}


def _capacity_curves(
    records: RecordsByAlpha, settings: MemorySettings
) -> Sequence[FigureCurve]:
    places = settings.capacities
    return [
        _curve_of_points(
            f"{alpha:g}", places, [record["points"] for record in records_of_part]
        )
        for alpha, records_of_part in records.items()
    ]


def _by_size(population: Population) -> PartRecord:
    lines = {}
    for size in population.settings.size:
        accuracies = population.accuracies(size / population.mean_size)
        lines[str(size)] = accuracies[:, 0, 0].tolist()
    return {"lines": lines}


def _by_scale(population: Population) -> PartRecord:
    scales = sorted(set(population.settings.kernel_scales))
    # The choices are ordered by descending scale.
    accuracies = population.accuracies(kernel_scales=scales).flip(2)
    lines = {
        f"{scale:g}": accuracies[:, 0, at].tolist() for at, scale in enumerate(scales)
    }
    return {"lines": lines}


def _by_neighbors(population: Population) -> PartRecord:
    counts = sorted(set(population.settings.num_neighbors))
    alone = population.accuracies(knn_weights=(1.0,), num_neighbors=counts)
    chosen = [population.with_neighbors(count).at_capacity(1.0) for count in counts]
    return {
        "chosen": [point["accuracy"] for point in chosen],
        "alone": alone[0, :, 0].tolist(),
    }


def _neighbors_curves(
    records: RecordsByAlpha, settings: MemorySettings
) -> Sequence[FigureCurve]:
    places = sorted(set(settings.num_neighbors))
    return [
        curve_over(label, places, [record[name] for record in _only(records)])
        for name, label in _KINDS.items()
    ]


def _weak_and_strong(population: Population) -> PartRecord:
    """Measure clients with ½ - ΔC and ½ + ΔC of their images, and both together."""

    def strong(imbalance: float, num_known: int) -> int:
        return size_at(num_known, 0.5 + imbalance)

    def weak(imbalance: float, num_known: int) -> int:
        # The remaining images, not ½ - ΔC rounded, so that the total memory is
        # constant.
        return num_known - strong(imbalance, num_known)

    pairs = [
        [population.at_sizes(functools.partial(size, share)) for size in (weak, strong)]
        for share in population.settings.imbalances
    ]
    both = [{name: (low[name] + high[name]) / 2 for name in low} for low, high in pairs]
    weaks, strongs = map(list, zip(*pairs, strict=True))
    return dict(zip(_GROUPS, (weaks, strongs, both), strict=True))


def _hardware_curves(
    records: RecordsByAlpha, settings: MemorySettings
) -> Sequence[FigureCurve]:
    return [
        _curve_of_points(
            label, settings.imbalances, [record[group] for record in _only(records)]
        )
        for group, label in _GROUPS.items()
    ]


def _best_weights(population: Population) -> PartRecord:
    """Return the chosen λ of each client and capacity, and the counts of each λ."""
    knn, points = population.service.knn, []
    choices = ParameterGrid.of(
        knn.knn_weights, (knn.num_neighbors,), (knn.kernel_scale,)
    )
    capacities = population.settings.capacities
    for client in population.clients:
        sizes = {size_at(len(client.known), fraction) for fraction in capacities}
        # Without stored or test images, all λ are equally good.
        for size in sorted(sizes - {0}) if len(client.test) > 0 else ():
            correct = count_correct_with_each(client, size, knn, choices).flatten()
            chosen = population.service.predictor(client, size).effective_knn_weight
            right = [int(is_right) for is_right in correct]
            points.append({"size": size, "chosen": chosen, "correct": right})
    return {"weights": list(choices.knn_weights), "points": points}


def _best_of_each(weights: Sequence[float], points: Points) -> float:
    # argmax returns the first maximum.
    return statistics.fmean(
        weights[int(np.argmax(point["correct"]))] for point in points
    )


def _best_together(weights: Sequence[float], points: Points) -> float:
    right = np.sum([point["correct"] for point in points], axis=0)
    return weights[int(np.argmax(right))]


# Ways to take one λ per point, then the mean over the points.
_OF_EACH: Mapping[str, Callable[[Sequence[float], Points], float]] = {
    "chosen by the client": lambda _, points: statistics.fmean(
        point["chosen"] for point in points
    ),
    "λ_opt, best on its test images (the paper's)": _best_of_each,
}
_WEIGHT_LINES = {
    **_OF_EACH,
    "best on the test images of all of that size": _best_together,
}


def _best_weight_curves(
    records: RecordsByAlpha, _: MemorySettings
) -> Sequence[FigureCurve]:
    records_of_part = _only(records)
    weights = records_of_part[0]["weights"]
    runs = [_grouped_by_power_of_two(record["points"]) for record in records_of_part]
    # Very small and very large sizes do not occur in every partition.
    sizes = sorted({size for run in runs for size in run})
    counts = [sum(len(run.get(size, ())) for run in runs) for size in sizes]
    return [
        curve_of(
            label,
            sizes,
            [
                [line(weights, run[size]) for run in runs if size in run]
                for size in sizes
            ],
            {"num_points": counts},
        )
        for label, line in _WEIGHT_LINES.items()
    ]


def _grouped_by_power_of_two(points: Points) -> Mapping[int, Points]:
    """Group the points by the largest power of two up to their size."""
    points_of: dict[int, list[PartRecord]] = defaultdict(list)
    for point in points:
        points_of[2 ** math.floor(math.log2(point["size"]))].append(point)
    return points_of


def _weight_correlations(records: RecordsByAlpha) -> Mapping[str, float | None]:
    """Correlate the λ of the points with the logarithm of their sizes."""
    records_of_part = _only(records)
    points = [point for record in records_of_part for point in record["points"]]
    sizes = [math.log(point["size"]) for point in points]
    weights = records_of_part[0]["weights"]
    return {
        label: correlation(sizes, [line(weights, [point]) for point in points])
        for label, line in _OF_EACH.items()
    }


PANELS: Mapping[str, Panel] = {
    "capacity": Panel(
        "Memory of new clients (Figure 1)",
        r"$\alpha$",
        "capacity, as a fraction of the client's images",
        ("alpha", "capacity", "accuracy"),
        _capacity_points,
        _capacity_curves,
        alphas=lambda _, settings: settings.alpha,
    ),
    "knn-weight": Panel(
        "λ of all clients, by the images that a client has (Figure 2)",
        "images, on average",
        _WEIGHT_AXIS,
        ("mean_num_stored", "knn_weight", "accuracy"),
        _by_size,
        _curves_by_weight,
    ),
    "neighbors": Panel(
        "Number of neighbours (Figure 5)",
        "kNN-Per",
        "neighbours, k",
        ("kind", "num_neighbors", "accuracy"),
        _by_neighbors,
        _neighbors_curves,
    ),
    "kernel-scale": Panel(
        "λ of all clients, by the scale of the kernel (Figure 7)",
        r"$\sigma$",
        _WEIGHT_AXIS,
        ("kernel_scale", "knn_weight", "accuracy"),
        _by_scale,
        _curves_by_weight,
    ),
    "best-weight": Panel(
        "λ by the images that a client stores (Figure 8)",
        "λ",
        "stored images: this number up to twice as many",
        ("kind", "num_stored_from", "knn_weight"),
        _best_weights,
        _best_weight_curves,
        log_x=True,
        correlations=_weight_correlations,
    ),
    "hardware": Panel(
        "Weak and strong clients (Figure 9)",
        "clients",
        "ΔC: capacity is ½ - ΔC of weak clients, ½ + ΔC of strong clients",
        ("clients", "imbalance", "accuracy"),
        _weak_and_strong,
        _hardware_curves,
    ),
}


def draw_memory(
    model: TrainedModel, settings: MemorySettings, folder: FigureFolder
) -> list[Drawing]:
    """Measure the missing parts of the figures in ``settings.only``, and draw them."""
    images = UnseenImages(model)
    settings = completed(settings, images)
    partition = model.experiment.partition.settings
    alpha_of_run = partition.alpha if isinstance(partition, DirichletSettings) else 0.3
    parts = {
        f"{name}, alpha {alpha:g}, partition {number}": (name, alpha, number)
        for name in dict.fromkeys(settings.only)
        for alpha in dict.fromkeys(PANELS[name].alphas(alpha_of_run, settings))
        for number in range(1, settings.partitions + 1)
    }
    measure = functools.partial(_measure, images, settings)
    records = folder.finish(parts, lambda part: measure(*parts[part]))
    records_of: dict[str, list[PartRecord]] = defaultdict(list)
    for (name, _, _), record in zip(parts.values(), records, strict=True):
        records_of[name].append(record)
    return [
        _drawing(name, settings, part_records)
        for name, part_records in records_of.items()
    ]


def completed(settings: MemorySettings, images: UnseenImages) -> MemorySettings:
    """Fill open settings from the run."""
    num_clients = settings.clients or max(images.num_clients, 1)
    images.require_clients(num_clients)
    sizes = settings.size or paper_sizes(images.num_known / num_clients)
    return replace(settings, clients=num_clients, size=sizes)


def paper_sizes(mean_size: float) -> tuple[int, ...]:
    """Return the paper's mean sizes: 5, 25, 100 and 250 of 250."""
    fractions = (1 / 50, 1 / 10, 2 / 5, 1.0)
    return tuple(
        sorted({max(1, round(fraction * mean_size)) for fraction in fractions})
    )


def _measure(
    images: UnseenImages, settings: MemorySettings, name: str, alpha: float, number: int
) -> PartRecord:
    # All figures use the same populations, so that they are comparable.
    key = RandomKey(settings.seed).child("memory", "deal", number, f"{alpha:g}")
    clients = images.partition(settings.clients or 1, alpha, key)
    population = Population(clients, NewClientService.of(images.model), settings)
    return {
        "alpha": alpha,
        "num_test": len(images.test),
        "mean_size": population.mean_size,
        "global_accuracy": population.accuracy(images.test.num_correct()),
        **PANELS[name].measure(population),
    }


def _drawing(
    name: str, settings: MemorySettings, measured: Sequence[PartRecord]
) -> Drawing:
    panel = PANELS[name]
    by_alpha = defaultdict(list)
    for record in measured:
        by_alpha[record["alpha"]].append(record)
    curves = panel.curves(by_alpha, settings)
    first, facts = measured[0], ("num_test", "mean_size", "global_accuracy")
    table = Table(
        panel.title,
        (panel.columns[0], *(f"{place:g}" for place in curves[0].x)),
        tuple(
            (curve.label, *(f"{mean:.3f}" for mean in curve.mean)) for curve in curves
        ),
    )
    return Drawing(
        name=name,
        title=panel.title,
        tables=(table,),
        header=(*panel.columns, f"{panel.columns[2]}_std", *curves[0].details),
        rows=curve_rows(curves),
        figure=_picture(panel, curves, first["global_accuracy"]),
        records=measured,
        details={
            "title": panel.title,
            **{fact: first[fact] for fact in facts},
            "correlations": panel.correlations(by_alpha),
            "curves": [asdict(curve) for curve in curves],
        },
    )


@styled
def _picture(
    panel: Panel, curves: Sequence[FigureCurve], global_accuracy: float
) -> Figure:
    """Draw the curves of a figure and the global model's accuracy."""
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    plot_curves(axes, curves)
    axes.set_xlabel(panel.x_label)
    axes.set_title(panel.title)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves[0].x, [f"{place:g}" for place in curves[0].x])
    if panel.columns[2] == "accuracy":
        accuracy_axis(axes)
        axes.axhline(
            global_accuracy, color=SOFT.light, linestyle=":", label="global model"
        )
    else:
        axes.set_ylabel("λ")
        axes.grid(alpha=0.3)
    _, labels = axes.get_legend_handles_labels()
    # Below the axes; inside, the legend would hide the steepest curve.
    figure.legend(
        title=panel.legend,
        loc="outside lower center",
        ncols=1 if any(len(label) > _LONG_LABEL for label in labels) else 4,
        fontsize="small",
    )
    return figure
