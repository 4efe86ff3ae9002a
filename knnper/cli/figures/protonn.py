"""``knnper figure protonn``: prototypes in place of the stores."""

from dataclasses import replace
from typing import Annotated

import typer

from knnper.cli.figures.options import Output, RunFolder, Seed, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.output import print_table


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
    with progress() as on_part:
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
    say_where(output)
