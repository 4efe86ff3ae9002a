"""The ProtoNN figure: from the global model of a run to numbers and a picture."""

import functools
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from simulation.figures.embedded import Embedder
from simulation.figures.folder import FigureFolder, OnPart, PartRecord, identity_of
from simulation.figures.knn_weight import knn_settings
from simulation.figures.options import ProtoNNOptions
from simulation.figures.palette import INK, SERIES, SOFT
from simulation.figures.protonn import (
    ClientSplits,
    ProtoNNFigureSettings,
    compress_client,
)
from simulation.figures.protonn_points import Point, ProtoNNPoints, protonn_points
from simulation.figures.style import accuracy_axis, styled
from simulation.showing import Chart, Shown, Table, percent
from simulation.trained_model import TrainedModel

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
