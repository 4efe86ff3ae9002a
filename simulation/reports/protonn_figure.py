"""kNN-Per with prototypes in place of the store, at one client.

knn-per.txt, Appendix B, "Adding compression techniques", Figure 11.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from knnper.datastore.prediction import NeighborClassifier
from knnper.datastore.protonn import ProtoNNSettings, fit_protonn
from knnper.datastore.store import memory_store
from knnper.datastore.tuning import choose_knn_weight, weights_to_choose_from
from knnper.errors import RunError
from knnper.experiment import PositiveFraction, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.simulation.reports.figure import (
    INK,
    SERIES,
    SOFT,
    FigureFolder,
    OnPart,
    PartRecord,
    ProtoNNOptions,
    accuracy_axis,
    identity_of,
    styled,
)
from knnper.simulation.reports.memory_figures import (
    Embedded,
    Embedder,
    knn_settings,
    num_correct_,
)
from knnper.simulation.reports.tables import Chart, Shown, Table, percent
from knnper.simulation.trained_model import TrainedModel
from knnper.strategies.core.memory import KnnSettings

Fit = Callable[[Embedded], tuple[Callable[[Tensor], Tensor], int]]
"""``examples -> (predictor, bytes)``."""

_LABEL_BYTES = 8


@dataclass(frozen=True)
class ProtoNNFigureSettings(Settings):
    """What the ProtoNN figure shows.

    Attributes
    ----------
    num_clients
        The first so many of the run's clients; null is all.
    capacities
        Prototypes as fractions of a client's examples; 0.1 ... 1 in the paper.
    projection_dims
        d̂; 100, 200 ... 1200 and p = 1280 in the paper.
    training
        How each is trained; capacity and dimension are those above.
    knn
        k, kernel and σ of the store it is compared with, and the grid of λ of both.
    """

    num_clients: PositiveInt | None
    capacities: tuple[PositiveFraction, ...]
    projection_dims: tuple[PositiveInt, ...]
    training: ProtoNNSettings = field(default_factory=ProtoNNSettings)
    knn: KnnSettings = field(default_factory=KnnSettings)

    def cells(self) -> Iterator[ProtoNNSettings]:
        """Yield the settings of each point of the figure."""
        for dim in self.projection_dims:
            for capacity in self.capacities:
                yield replace(self.training, capacity=capacity, projection_dim=dim)


@dataclass(frozen=True, eq=False)
class ClientSplits:
    """One client's images, embedded."""

    train: Embedded
    validation: Embedded
    test: Embedded


def compress_client(
    client: ClientSplits, settings: ProtoNNFigureSettings, key: RandomKey
) -> PartRecord:
    """Return how often one client is right at each point of the figure.

    λ is chosen on the validation split for what is fitted on the training split; what
    is tested is fitted on both, as kNN-Per's store holds both (knn-per.txt, section 5).

    Returns
    -------
    Mapping
        ``cells`` in the order of `ProtoNNFigureSettings.cells`, and ``store`` for
        kNN-Per itself: [correct, validation_correct, λ, bytes] each.
    """
    return {
        "num_test": len(client.test),
        "num_validation": len(client.validation),
        "global_correct": client.test.num_correct(),
        "store": _measured(client, settings.knn, _store_fit(settings.knn)),
        "cells": [
            _measured(client, settings.knn, _protonn_fit(cell, key))
            for cell in settings.cells()
        ],
    }


def _measured(client: ClientSplits, knn: KnnSettings, fit: Fit) -> list[float]:
    knn_weight, on_validation = weights_to_choose_from(knn.knn_weights)[0], 0
    validation, test = client.validation, client.test
    if len(client.train) > 0 and len(validation) > 0:
        predict, _ = fit(client.train)
        local = predict(validation.embeddings)
        seen = local, validation.probabilities, validation.labels
        knn_weight = choose_knn_weight(*seen, knn.knn_weights)
        on_validation = num_correct_(*seen, knn_weight)
    both = client.train.followed_by(validation)
    if len(both) == 0:
        return [test.num_correct(), on_validation, 0.0, 0]
    predict, num_bytes = fit(both)
    correct = num_correct_(
        predict(test.embeddings), test.probabilities, test.labels, knn_weight
    )
    return [correct, on_validation, knn_weight, num_bytes]


def _protonn_fit(cell: ProtoNNSettings, key: RandomKey) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        model = fit_protonn(
            examples.embeddings,
            examples.labels,
            examples.probabilities.shape[1],
            cell,
            key,
        )
        return model, model.num_bytes

    return fit


def _store_fit(knn: KnnSettings) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        store = memory_store(
            examples.embeddings, examples.labels, examples.probabilities.shape[1]
        )
        classifier = NeighborClassifier(
            store, knn.num_neighbors, knn.kernel, knn.kernel_scale
        )
        return classifier, len(examples) * (4 * store.embedding_dim + _LABEL_BYTES)

    return fit


@dataclass(frozen=True)
class Point:
    """What all clients together have at one point of the figure.

    Attributes
    ----------
    capacity, projection_dim
        Of the prototypes; None for kNN-Per with all examples stored.
    accuracy, validation_accuracy
        Over all clients' test images and validation images; the latter is what λ was
        chosen by, and so too good by a little.
    mean_knn_weight
        λ, over the clients.
    mean_bytes
        Of what a client keeps.
    """

    capacity: float | None
    projection_dim: int | None
    accuracy: float
    validation_accuracy: float
    mean_knn_weight: float
    mean_bytes: float


@dataclass(frozen=True)
class ProtoNNPoints:
    """The figure's numbers.

    Attributes
    ----------
    points
        In the order of `ProtoNNFigureSettings.cells`.
    store
        kNN-Per.
    global_accuracy
        The global model's, over all clients' test images.
    num_clients
        Clients in the figure.
    """

    points: tuple[Point, ...]
    store: Point
    global_accuracy: float
    num_clients: int


def protonn_points(
    records: Sequence[PartRecord], settings: ProtoNNFigureSettings
) -> ProtoNNPoints:
    """Return what the clients' records show together.

    Parameters
    ----------
    records
        Of `compress_client`, one a client.
    settings
        What they were made with.

    Raises
    ------
    RunError
        If the clients have no test images.
    """
    num_test = sum(record["num_test"] for record in records)
    num_validation = sum(record["num_validation"] for record in records)
    if num_test == 0:
        raise RunError(
            f"found no test images at {len(records)} clients; take more of them"
        )

    def point(
        capacity: float | None, dim: int | None, measured: Sequence[Sequence[float]]
    ) -> Point:
        correct, right, weights, sizes = map(sum, zip(*measured, strict=True))
        num_clients = len(measured)
        return Point(
            capacity,
            dim,
            accuracy=correct / num_test,
            validation_accuracy=right / max(num_validation, 1),
            mean_knn_weight=weights / num_clients,
            mean_bytes=sizes / num_clients,
        )

    points = tuple(
        point(cell.capacity, cell.projection_dim, [one["cells"][at] for one in records])
        for at, cell in enumerate(settings.cells())
    )
    store = point(None, None, [record["store"] for record in records])
    global_correct = sum(record["global_correct"] for record in records)
    return ProtoNNPoints(points, store, global_correct / num_test, len(records))


NAME = "protonn"

TITLE = "kNN-Per with ProtoNN in place of the store (Figure 11)"

_PAPER_CAPACITIES = tuple(number / 10 for number in range(1, 11))

_DASHES = ("-", "--")

_FEW_CLIENTS, _FEW_CAPACITIES = 50, (0.1, 0.3, 0.6, 1.0)


def show_protonn(
    model: TrainedModel, output: Path, options: ProtoNNOptions, on_part: OnPart
) -> Shown:
    """Make the figure as `draw_protonn` does; return what it shows."""
    settings = protonn_settings(model, options)
    points = draw_protonn(model, output, settings, options.seed, on_part)
    chart = Chart(NAME, TITLE, functools.partial(_picture, points))
    return Shown((_table(points),), (chart,))


def _table(points: ProtoNNPoints) -> Table:
    rows = [_row(point) for point in (*points.points, points.store)]
    rows.append(("global model", "", percent(points.global_accuracy), ""))
    header = ("dimensions", "prototypes", "accuracy", "bytes")
    return Table(TITLE, header, tuple(rows))


def _row(point: Point) -> tuple[str, ...]:
    return (
        str(point.projection_dim or "kNN-Per"),
        str(point.capacity or "all examples"),
        percent(point.accuracy),
        f"{point.mean_bytes:,.0f}",
    )


def paper_dims(embedding_dim: int) -> tuple[int, ...]:
    """Return the paper's projection dimensions, 100, 200 ... 1200 and 1280 of 1280.

    For embeddings of another size p, the same fractions of it.
    """
    fractions = [100 * number / 1280 for number in range(1, 13)]
    scaled = (max(1, round(fraction * embedding_dim)) for fraction in fractions)
    return tuple(sorted({*scaled, embedding_dim}))


def protonn_settings(
    model: TrainedModel, options: ProtoNNOptions
) -> ProtoNNFigureSettings:
    """Return the settings of the figure, with what the options leave open.

    Parameters
    ----------
    model
        Gives p, and the run's settings of kNN-Per.
    options
        What is chosen.

    Raises
    ------
    RunError
        If a dimension exceeds p.
    """
    require_dims(options.dim, model.embedding_dim)
    every_dim = paper_dims(model.embedding_dim)
    some_dims = (*every_dim[:8][::3], every_dim[-1])
    full = options.full
    settings = ProtoNNFigureSettings(
        options.clients or (None if full else _FEW_CLIENTS),
        options.capacity or (_PAPER_CAPACITIES if full else _FEW_CAPACITIES),
        tuple(sorted(set(options.dim or (every_dim if full else some_dims)))),
        knn=knn_settings(model.experiment),
    )
    if options.steps is None:
        return settings
    training = replace(settings.training, num_steps=options.steps)
    return replace(settings, training=training)


def require_dims(dims: tuple[int, ...], embedding_dim: int) -> None:
    """Refuse projections to more dimensions than an embedding has.

    Raises
    ------
    RunError
        With the first of them.
    """
    for dim in dims:
        if dim > embedding_dim:
            raise RunError(
                f"found a projection to {dim} dimensions, expected at most "
                f"{embedding_dim}, those of the model's embeddings; give another dim"
            )


def draw_protonn(
    model: TrainedModel,
    output: Path,
    settings: ProtoNNFigureSettings,
    seed: int,
    on_part: OnPart,
) -> ProtoNNPoints:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes protonn.csv, .png, .svg, .pdf and .json.

    Parameters
    ----------
    model
        The global model.
    output
        The folder.
    settings
        What is shown.
    seed
        Fixes every random choice.
    on_part
        Is told of every client that is done.

    Raises
    ------
    RunError
        If the folder holds something else, or the clients have no test images.
    """
    identity = identity_of(NAME, model, settings, seed)
    key = RandomKey(seed).child(NAME)
    with FigureFolder.open(output, identity) as folder:
        records = _records(model, folder, settings, key, on_part)
        points = protonn_points(records, settings)
        _write(folder, points)
        details = {
            "run": model.experiment.name,
            "num_clients": points.num_clients,
            "global_accuracy": points.global_accuracy,
        }
        folder.write_description(identity, records, details)
    return points


def _records(
    model: TrainedModel,
    folder: FigureFolder,
    settings: ProtoNNFigureSettings,
    key: RandomKey,
    on_part: OnPart,
) -> list[PartRecord]:
    chosen = model.partition.clients[: settings.num_clients]
    parts = {part.name: part for part in chosen}
    embedder = Embedder(model)

    def compress(name: str) -> PartRecord:
        part = parts[name]
        splits = ClientSplits(
            embedder.train(part.train),
            embedder.train(part.validation),
            embedder.test(part.test),
        )
        return compress_client(splits, settings, key.child(name))

    return folder.finish(list(parts), compress, on_part)


def _write(folder: FigureFolder, points: ProtoNNPoints) -> None:
    header = (
        "projection_dim",
        "capacity",
        "accuracy",
        "validation_accuracy",
        "mean_knn_weight",
        "mean_bytes",
    )
    folder.write_csv(
        f"{NAME}.csv",
        header,
        (
            [getattr(point, name) for name in header]
            for point in (*points.points, points.store)
        ),
    )
    folder.write_pictures(NAME, _picture(points))


@styled
def _picture(points: ProtoNNPoints) -> Figure:
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    dims = list(dict.fromkeys(point.projection_dim for point in points.points))
    for number, dim in enumerate(dims):
        dashes = _DASHES[number // len(SERIES) % len(_DASHES)]
        line = [point for point in points.points if point.projection_dim == dim]
        axes.plot(
            [point.capacity or 1.0 for point in line],
            [point.accuracy for point in line],
            f"o{dashes}",
            markersize=3,
            color=SERIES[number % len(SERIES)].light,
            label=f"{dim} dimensions",
        )
    axes.axhline(points.store.accuracy, color=INK.light, label="kNN-Per, all examples")
    axes.axhline(
        points.global_accuracy, color=SOFT.light, linestyle=":", label="Global model"
    )
    accuracy_axis(axes)
    axes.set_xlabel("prototypes, as a fraction of the client's examples")
    axes.set_title(f"kNN-Per with ProtoNN, {points.num_clients} clients")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
