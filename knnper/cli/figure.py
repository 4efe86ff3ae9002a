"""``knnper figure``: the paper's figures, with the global model of a finished run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from knnper.cli.output import print_table, say

if TYPE_CHECKING:
    from simulation.figures.folder import OnPart

SECONDS_BETWEEN_LINES = 5.0

figure = typer.Typer(
    name="figure",
    no_args_is_help=True,
    help="Draw a figure of the paper with the global model of a finished run.",
)

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
]
Output = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Where numbers and pictures go; a figure that was left there goes on.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random choice.")]


@figure.command()
def drift(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: Output,
    clients: Annotated[int, typer.Option(min=1, help="M, the clients.")] = 100,
    steps: Annotated[int, typer.Option(min=2, help="T, batches that arrive.")] = 100,
    shift_at: Annotated[
        int, typer.Option(min=1, help="t0, the batches before the shift.")
    ] = 50,
    alpha: Annotated[
        float, typer.Option(min=1e-6, help="Of both Dirichlet draws.")
    ] = 0.3,
    knn_weight: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Of all clients; by default each chooses once."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Follow a shift of the clients' data: fixed, FIFO and concatenate (Figure 14)."""
    if shift_at >= steps:
        raise typer.BadParameter(f"expected --shift-at below --steps, found {shift_at}")
    # Everything below loads torch, which `knnper --help` need not wait for.
    from simulation.figures.drift import DriftSettings
    from simulation.figures.drift_figure import draw_drift
    from simulation.figures.drift_streams import StreamSettings
    from simulation.figures.knn_weight import knn_settings
    from simulation.trained_model import trained_model

    model = trained_model(run)
    settings = DriftSettings(
        StreamSettings(clients, alpha, steps, shift_at),
        knn_settings(model.experiment),
        knn_weight,
    )
    with _progress() as on_part:
        curves = draw_drift(model, output, settings, seed, on_part)
    moments = (0, shift_at - 1, shift_at, steps)
    header = ("batches received", *map(str, moments))
    rows = [
        (name, *(f"{100 * accuracy[at]:.1f} %" for at in moments))
        for name, accuracy in curves.accuracy.items()
    ]
    rows += [
        (f"clients alarmed, {name}", *(f"{100 * part[at]:.1f} %" for at in moments))
        for name, part in curves.alarmed.items()
    ]
    print_table(header, rows)
    say(f"Numbers and pictures are in {output}")


@figure.command()
def protonn(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: Output,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The first so many of the run's clients.",
            show_default="50, or all with --full",
        ),
    ] = None,
    capacities: Annotated[
        list[float] | None,
        typer.Option(
            "--capacity",
            min=1e-6,
            max=1.0,
            help="Prototypes by a client's examples; may be repeated.",
            show_default="0.1 0.3 0.6 1; 0.1 0.2 ... 1 with --full",
        ),
    ] = None,
    dims: Annotated[
        list[int] | None,
        typer.Option(
            "--dim",
            min=1,
            help="Projection dimension; may be repeated.",
            show_default="4, or 13 with --full, up to that of the embeddings",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All clients and the paper's whole grid.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of training.", show_default="30")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Replace the stores by few learned prototypes (Figure 11)."""
    from simulation.figures.protonn_figure import draw_protonn, protonn_settings
    from simulation.trained_model import trained_model

    model = trained_model(run)
    settings = protonn_settings(
        model, clients, tuple(capacities or ()), tuple(dims or ()), full=full
    )
    if steps is not None:
        settings = replace(
            settings, training=replace(settings.training, num_steps=steps)
        )
    with _progress() as on_part:
        points = draw_protonn(model, output, settings, seed, on_part)
    header = ("dimensions", "prototypes", "accuracy", "bytes")
    rows = [
        (
            str(point.projection_dim or "kNN-Per"),
            str(point.capacity or "all examples"),
            f"{100 * point.accuracy:.1f} %",
            f"{point.mean_bytes:,.0f}",
        )
        for point in (*points.points, points.store)
    ]
    rows.append(("global model", "", f"{100 * points.global_accuracy:.1f} %", ""))
    print_table(header, rows)
    say(f"Numbers and pictures are in {output}")


@contextlib.contextmanager
def _progress() -> "Iterator[OnPart]":
    """Yield what draws a bar on a terminal, and writes lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line_writer(say)
        return
    with Progress(*Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task("clients", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def line_writer(
    write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> "OnPart":
    """Return what writes a line now and then, with the time that is left.

    Parameters
    ----------
    write
        Takes a line.
    clock
        Returns seconds.
    """
    began = last = clock()
    at_first: int | None = None

    def on_part(done: int, total: int) -> None:
        nonlocal at_first, last
        if at_first is None:
            at_first = done
        now = clock()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = ""
        if done > at_first:
            seconds = (now - began) / (done - at_first) * (total - done)
            left = f", {seconds:.0f} s left"
        write(f"{done}/{total} clients{left}")

    return on_part
