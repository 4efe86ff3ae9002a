"""The ProtoNN figure: from the global model of a run to numbers and a picture."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from simulation.figures.embedded import Embedder
from simulation.figures.folder import FigureFolder, OnPart, PartRecord, identity_of
from simulation.figures.knn_weight import knn_settings
from simulation.figures.protonn import (
    ClientSplits,
    ProtoNNFigureSettings,
    compress_client,
)
from simulation.figures.protonn_points import ProtoNNPoints, protonn_points
from simulation.figures.style import accuracy_axis
from simulation.trained_model import TrainedModel

NAME = "protonn"
_PAPER_CAPACITIES = tuple(number / 10 for number in range(1, 11))
_FEW_CLIENTS, _FEW_CAPACITIES = 50, (0.1, 0.3, 0.6, 1.0)


def paper_dims(embedding_dim: int) -> tuple[int, ...]:
    """Return the paper's projection dimensions, 100, 200 ... 1200 and 1280 of 1280.

    For embeddings of another size p, the same fractions of it.
    """
    fractions = [100 * number / 1280 for number in range(1, 13)]
    scaled = (max(1, round(fraction * embedding_dim)) for fraction in fractions)
    return tuple(sorted({*scaled, embedding_dim}))


def protonn_settings(
    model: TrainedModel,
    num_clients: int | None,
    capacities: tuple[float, ...],
    dims: tuple[int, ...],
    *,
    full: bool,
) -> ProtoNNFigureSettings:
    """Return the settings of the figure; what is not given is chosen.

    Parameters
    ----------
    model
        Gives p, and the run's settings of kNN-Per.
    num_clients, capacities, dims
        See `ProtoNNFigureSettings`; None or empty is not given.
    full
        Whether all clients and the paper's whole grid are chosen, or some of them.

    Raises
    ------
    RunError
        If a dimension exceeds p.
    """
    require_dims(dims, model.embedding_dim)
    every_dim = paper_dims(model.embedding_dim)
    some_dims = (*every_dim[:8][::3], every_dim[-1])
    return ProtoNNFigureSettings(
        num_clients or (None if full else _FEW_CLIENTS),
        capacities or (_PAPER_CAPACITIES if full else _FEW_CAPACITIES),
        tuple(sorted(set(dims or (every_dim if full else some_dims)))),
        knn=knn_settings(model.experiment),
    )


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
                f"{embedding_dim}, those of the model's embeddings; give another --dim"
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
    folder = FigureFolder.open(output, identity)
    records = _records(model, folder, settings, RandomKey(seed).child(NAME), on_part)
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


def _picture(points: ProtoNNPoints) -> Figure:
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    dims = list(dict.fromkeys(point.projection_dim for point in points.points))
    colors = colormaps["viridis"].resampled(len(dims))
    for number, dim in enumerate(dims):
        line = [point for point in points.points if point.projection_dim == dim]
        axes.plot(
            [point.capacity or 1.0 for point in line],
            [point.accuracy for point in line],
            "o-",
            markersize=3,
            color=colors(number),
            label=f"{dim} dimensions",
        )
    axes.axhline(points.store.accuracy, color="k", label="kNN-Per, all examples")
    axes.axhline(points.global_accuracy, color="k", linestyle=":", label="Global model")
    accuracy_axis(axes)
    axes.set_xlabel("prototypes, as a fraction of the client's examples")
    axes.set_title(f"kNN-Per with ProtoNN, {points.num_clients} clients")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
