"""What the clients of the ProtoNN figure show together."""

from collections.abc import Sequence
from dataclasses import dataclass

from knnper.config.errors import RunError
from simulation.figures.folder import PartRecord
from simulation.figures.protonn import ProtoNNFigureSettings


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
        Of `simulation.figures.protonn.compress_client`, one a client.
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
