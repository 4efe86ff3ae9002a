"""The drift figure: from the global model of a run to numbers and a picture."""

import functools
from pathlib import Path

from matplotlib.figure import Figure

from knnper.config.seeding import RandomKey
from simulation.figures.drift import ClientDrift, DriftSettings, follow_client
from simulation.figures.drift_curves import GLOBAL, DriftCurves, drift_curves
from simulation.figures.drift_streams import (
    StreamSettings,
    drift_streams,
    require_enough_images,
)
from simulation.figures.embedded import Embedder
from simulation.figures.folder import FigureFolder, OnPart, PartRecord, identity_of
from simulation.figures.knn_weight import knn_settings
from simulation.figures.options import DriftOptions
from simulation.figures.palette import SOFT
from simulation.figures.style import accuracy_axis, styled
from simulation.partition.split import client_names
from simulation.showing import Chart, Shown, Table, percent
from simulation.trained_model import TrainedModel

NAME = "drift"
TITLE = "A shift of the clients' data (Figure 14)"
_LABELS = {
    "concatenate": "Concatenate",
    "fifo": "FIFO",
    "fixed": "Fixed datastore",
    GLOBAL: "Global model",
    "distance": "distance to the neighbours",
    "distance_to_own_label": "distance to those of its label",
}


def show_drift(
    model: TrainedModel, output: Path, options: DriftOptions, on_part: OnPart
) -> Shown:
    """Make the figure as `draw_drift` does; return what it shows."""
    streams = StreamSettings(
        options.clients, options.alpha, options.steps, options.shift_at
    )
    knn = knn_settings(model.experiment)
    settings = DriftSettings(streams, knn, options.knn_weight)
    curves = draw_drift(model, output, settings, options.seed, on_part)
    draw = functools.partial(_picture, curves, streams.shift_at)
    return Shown((_table(curves, streams),), (Chart(NAME, TITLE, draw),))


def _table(curves: DriftCurves, streams: StreamSettings) -> Table:
    moments = (0, streams.shift_at - 1, streams.shift_at, streams.num_steps)
    lines = {
        **curves.accuracy,
        **{f"clients alarmed, {name}": one for name, one in curves.alarmed.items()},
    }
    return Table(
        TITLE,
        ("batches received", *map(str, moments)),
        tuple(
            (name, *(percent(line[at]) for at in moments))
            for name, line in lines.items()
        ),
    )


def draw_drift(
    model: TrainedModel,
    output: Path,
    settings: DriftSettings,
    seed: int,
    on_part: OnPart,
) -> DriftCurves:
    """Make the figure in the folder ``output``; go on with it where it was left.

    Writes drift.csv, .png, .svg, .pdf and .json.

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
        If the folder holds something else, or there are too few images for so many
        clients.
    """
    require_enough_images(len(model.dataset.train.labels), settings.streams.num_clients)
    identity = identity_of(NAME, model, settings, seed)
    key = RandomKey(seed).child(NAME)
    with FigureFolder.open(output, identity) as folder:
        records = _records(model, folder, settings, key, on_part)
        curves = drift_curves(
            records, settings.streams.num_steps, settings.streams.shift_at
        )
        _write(folder, curves, settings)
        details = {
            "run": model.experiment.name,
            "num_clients": curves.num_clients,
            "mean_knn_weight": curves.mean_knn_weight,
        }
        folder.write_description(identity, records, details)
    return curves


def _records(
    model: TrainedModel,
    folder: FigureFolder,
    settings: DriftSettings,
    key: RandomKey,
    on_part: OnPart,
) -> list[PartRecord]:
    data = model.dataset
    streams = drift_streams(
        data.train.labels, data.test.labels, settings.streams, key.child("streams")
    )
    # A client without a first store follows no policy.
    stream_of = {
        name: stream
        for name, stream in zip(client_names(len(streams)), streams, strict=True)
        if len(stream.initial) > 0
    }
    embedder = Embedder(model)

    def follow(name: str) -> PartRecord:
        client = ClientDrift.of(stream_of[name], embedder)
        return follow_client(client, settings, key.child("alarms", name))

    return folder.finish(list(stream_of), follow, on_part)


def _write(folder: FigureFolder, curves: DriftCurves, settings: DriftSettings) -> None:
    columns: list[tuple[str, list[float]]] = [
        *((f"accuracy_{name}", curve) for name, curve in curves.accuracy.items()),
        *((f"mean_stored_{name}", curve) for name, curve in curves.mean_stored.items()),
        *((f"alarmed_{name}", curve) for name, curve in curves.alarmed.items()),
    ]
    rows = zip(*(curve for _, curve in columns), strict=True)
    folder.write_csv(
        f"{NAME}.csv",
        ["num_batches", *(name for name, _ in columns)],
        ([step, *row] for step, row in enumerate(rows)),
    )
    folder.write_pictures(NAME, _picture(curves, settings.streams.shift_at))


@styled
def _picture(curves: DriftCurves, shift_at: int) -> Figure:
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, accuracy in curves.accuracy.items():
        style = {"color": SOFT.light, "linestyle": ":"} if name == GLOBAL else {}
        top.plot(accuracy, label=_LABELS[name], **style)
    accuracy_axis(top)
    top.legend()
    top.set_title(f"A shift after {shift_at} batches, {curves.num_clients} clients")
    for name, fraction in curves.alarmed.items():
        bottom.plot(fraction, label=_LABELS[name])
    accuracy_axis(bottom, "clients alarmed")
    bottom.set_ylim(-0.03, 1.03)
    bottom.set_xlabel("time step (batches received)")
    bottom.legend()
    for axes in (top, bottom):
        axes.axvline(shift_at, color=SOFT.light, linestyle="--", linewidth=1)
    return figure
