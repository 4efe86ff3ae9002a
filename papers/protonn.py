"""kNN-Per with ProtoNN's prototypes in place of the store.

Marfoq et al. 2022, Appendix B, "Adding compression techniques", Figure 11.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from torch import Tensor

from knnper import (
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    RandomKey,
    RunError,
    Settings,
)
from knnper.datastore.memory import KnnSettings
from knnper.datastore.protonn import ProtoNNSettings, fit_protonn
from knnper.datastore.tuning import choose_knn_weight, knn_weight_grid
from knnper.simulation.reports.figure import INK, SERIES, SOFT, accuracy_axis, styled
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import percent
from knnper.simulation.trained_model import TrainedModel
from papers.figures import Drawing, FigureFolder, PartRecord, knn_settings
from papers.new_clients import Embedded, classifier, embed

# ``examples -> (predictor, bytes)``.
Fit = Callable[[Embedded], tuple[Callable[[Tensor], Tensor], int]]

_LABEL_BYTES = 8
_FEW_CLIENTS, _FEW_CAPACITIES = 50, (0.1, 0.3, 0.6, 1.0)
_PAPER_CAPACITIES = tuple(number / 10 for number in range(1, 11))
TITLE = "kNN-Per with ProtoNN in place of the store (Figure 11)"


@dataclass(frozen=True)
class ProtoNNFigureSettings(Settings):
    """Settings of the points in the figure.

    Attributes
    ----------
    clients
        Number of clients, the first of the run; null is 50, or all with ``full``.
    capacity
        Number of prototypes as a fraction of a client's examples; if empty, 0.1, 0.3,
        0.6 and 1, or 0.1, 0.2 ... 1 with ``full``.
    dim
        Projection dimensions d̂; if empty, 4 values up to the dimension of the
        embeddings, or 13 with ``full``.
    full
        Whether to use all clients and the paper's whole grid.
    steps
        Training steps; null is the default of ProtoNN's settings.
    seed
        Fixes every random choice.
    """

    clients: PositiveInt | None = None
    capacity: tuple[PositiveFraction, ...] = ()
    dim: tuple[PositiveInt, ...] = ()
    full: bool = False
    steps: NonNegativeInt | None = None
    seed: NonNegativeInt = 0


def completed(
    settings: ProtoNNFigureSettings, embedding_dim: int
) -> ProtoNNFigureSettings:
    """Fill open settings."""
    for dim in settings.dim:
        if dim > embedding_dim:
            raise RunError(
                f"found a projection to {dim} dimensions, expected at most "
                f"{embedding_dim}, those of the model's embeddings; give another dim"
            )
    full = settings.full
    every = paper_dims(embedding_dim)
    some = (*every[:8][::3], every[-1])
    return replace(
        settings,
        clients=settings.clients or (None if full else _FEW_CLIENTS),
        capacity=settings.capacity or (_PAPER_CAPACITIES if full else _FEW_CAPACITIES),
        dim=tuple(sorted(set(settings.dim or (every if full else some)))),
    )


def paper_dims(embedding_dim: int) -> tuple[int, ...]:
    """Return the paper's projection dimensions: 100, 200 ... 1200 and 1280 of 1280."""
    fractions = [100 * number / 1280 for number in range(1, 13)]
    scaled = (max(1, round(fraction * embedding_dim)) for fraction in fractions)
    return tuple(sorted({*scaled, embedding_dim}))


def cells_of(settings: ProtoNNFigureSettings) -> list[ProtoNNSettings]:
    """Return ProtoNN's settings at each point."""
    training = ProtoNNSettings()
    if settings.steps is not None:
        training = replace(training, num_steps=settings.steps)
    return [
        replace(training, capacity=capacity, projection_dim=dim)
        for dim in settings.dim
        for capacity in settings.capacity
    ]


@dataclass(frozen=True, eq=False)
class ClientSplits:
    """One client's images, embedded."""

    train: Embedded
    validation: Embedded
    test: Embedded


def compress_client(
    client: ClientSplits,
    cells: Sequence[ProtoNNSettings],
    knn: KnnSettings,
    key: RandomKey,
) -> PartRecord:
    """Count the correct predictions of one client at each point, and with kNN-Per.

    λ is chosen on the validation split for a model fitted on the training split. The
    tested model is fitted on both splits, since kNN-Per's store holds both (section 5).
    """

    def measured(fit: Fit) -> list[float]:
        validation, test = client.validation, client.test
        weight, on_validation = knn_weight_grid(knn.knn_weights)[0], 0
        if len(client.train) > 0 and len(validation) > 0:
            predict, _ = fit(client.train)
            local = predict(validation.embeddings)
            seen = validation.probabilities, validation.labels
            weight = choose_knn_weight(local, *seen, knn.knn_weights)
            on_validation = validation.num_correct(local, weight)
        both = client.train.followed_by(validation)
        if len(both) == 0:
            return [test.num_correct(), on_validation, 0.0, 0]
        predict, num_bytes = fit(both)
        correct = test.num_correct(predict(test.embeddings), weight)
        return [correct, on_validation, weight, num_bytes]

    return {
        "num_test": len(client.test),
        "num_validation": len(client.validation),
        "global_correct": client.test.num_correct(),
        "store": measured(_store_fit(knn)),
        "cells": [measured(_protonn_fit(cell, key)) for cell in cells],
    }


def _protonn_fit(cell: ProtoNNSettings, key: RandomKey) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        num_classes = examples.probabilities.shape[1]
        stored = examples.embeddings, examples.labels, num_classes
        model = fit_protonn(*stored, cell, key)
        return model, model.num_bytes

    return fit


def _store_fit(knn: KnnSettings) -> Fit:
    def fit(examples: Embedded) -> tuple[Callable[[Tensor], Tensor], int]:
        store = examples.store()
        num_bytes = len(examples) * (4 * store.embedding_dim + _LABEL_BYTES)
        return classifier(store, knn), num_bytes

    return fit


@dataclass(frozen=True)
class ProtoNNPoint:
    """Result over all clients at one point of the figure."""

    projection_dim: int | None
    capacity: float | None
    accuracy: float
    validation_accuracy: float
    mean_knn_weight: float
    mean_bytes: float


def points_of(
    records: Sequence[PartRecord], cells: Sequence[ProtoNNSettings]
) -> tuple[list[ProtoNNPoint], float]:
    """Return the points, with kNN-Per last, and the accuracy of the global model."""
    num_test = sum(record["num_test"] for record in records)
    num_validation = sum(record["num_validation"] for record in records)
    if num_test == 0:
        raise RunError(
            f"found no test images at {len(records)} clients; use more clients"
        )

    def point(
        cell: ProtoNNSettings | None, measured: Sequence[Sequence[float]]
    ) -> ProtoNNPoint:
        correct, right, weights, sizes = map(sum, zip(*measured, strict=True))
        return ProtoNNPoint(
            cell.projection_dim if cell else None,
            cell.capacity if cell else None,
            accuracy=correct / num_test,
            validation_accuracy=right / max(num_validation, 1),
            mean_knn_weight=weights / len(records),
            mean_bytes=sizes / len(records),
        )

    points = [
        point(cell, [record["cells"][at] for record in records])
        for at, cell in enumerate(cells)
    ]
    points.append(point(None, [record["store"] for record in records]))
    return points, sum(record["global_correct"] for record in records) / num_test


def draw_protonn(
    model: TrainedModel, settings: ProtoNNFigureSettings, folder: FigureFolder
) -> list[Drawing]:
    """Draw the figure."""
    settings = completed(settings, model.embedding_dim)
    parts = {
        client.name: client for client in model.partition.clients[: settings.clients]
    }
    cells = cells_of(settings)
    knn = knn_settings(model.experiment)
    key = RandomKey(settings.seed).child("protonn")
    data = model.dataset

    def compress(name: str) -> PartRecord:
        part = parts[name]
        splits = ClientSplits(
            embed(model, data.train, part.train),
            embed(model, data.train, part.validation),
            embed(model, data.test, part.test),
        )
        return compress_client(splits, cells, knn, key.child(name))

    records = folder.finish(parts, compress)
    points, global_accuracy = points_of(records, cells)
    header = list(ProtoNNPoint.__dataclass_fields__)
    return [
        Drawing(
            name="protonn",
            title=TITLE,
            tables=(_table(points, global_accuracy),),
            header=header,
            rows=[[getattr(point, name) for name in header] for point in points],
            figure=_picture(points, global_accuracy, len(records)),
            records=records,
            details={"num_clients": len(records), "global_accuracy": global_accuracy},
        )
    ]


def _table(points: Sequence[ProtoNNPoint], global_accuracy: float) -> Table:
    rows = [
        (
            str(point.projection_dim or "kNN-Per"),
            str(point.capacity or "all examples"),
            percent(point.accuracy),
            f"{point.mean_bytes:,.0f}",
        )
        for point in points
    ]
    rows.append(("global model", "", percent(global_accuracy), ""))
    return Table(TITLE, ("dimensions", "prototypes", "accuracy", "bytes"), tuple(rows))


@styled
def _picture(
    points: Sequence[ProtoNNPoint], global_accuracy: float, num_clients: int
) -> Figure:
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    *cells, store = points
    dims = list(dict.fromkeys(point.projection_dim for point in cells))
    for number, dim in enumerate(dims):
        line = [point for point in cells if point.projection_dim == dim]
        axes.plot(
            [point.capacity or 1.0 for point in line],
            [point.accuracy for point in line],
            "o-" if number // len(SERIES) % 2 == 0 else "o--",
            markersize=3,
            color=SERIES[number % len(SERIES)].light,
            label=f"{dim} dimensions",
        )
    axes.axhline(store.accuracy, color=INK.light, label="kNN-Per, all examples")
    axes.axhline(global_accuracy, color=SOFT.light, linestyle=":", label="Global model")
    accuracy_axis(axes)
    axes.set_xlabel("prototypes, as a fraction of the client's examples")
    axes.set_title(f"kNN-Per with ProtoNN, {num_clients} clients")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
