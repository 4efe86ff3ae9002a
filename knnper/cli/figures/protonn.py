"""``knnper figure protonn``: prototypes in place of the stores."""

from typing import Annotated

import typer

from knnper.cli.figures.drawing import draw_of_run
from knnper.cli.figures.options import Output, RunFolder, Seed, given


def protonn(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: Output,
    clients: Annotated[
        int | None,
        typer.Option(
            help="The first so many of the run's clients.",
            show_default="50, or all with --full",
        ),
    ] = None,
    capacity: Annotated[
        list[float] | None,
        typer.Option(
            help="Prototypes by a client's examples; may be repeated.",
            show_default="0.1 0.3 0.6 1; 0.1 0.2 ... 1 with --full",
        ),
    ] = None,
    dim: Annotated[
        list[int] | None,
        typer.Option(
            help="Projection dimension; may be repeated.",
            show_default="4, or 13 with --full, up to that of the embeddings",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All clients and the paper's whole grid.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Steps of training.", show_default="30")
    ] = None,
    seed: Seed = None,
) -> None:
    """Replace the stores by few learned prototypes (Figure 11)."""
    options = given(
        clients=clients,
        capacity=capacity,
        dim=dim,
        full=full or None,
        steps=steps,
        seed=seed,
    )
    draw_of_run("protonn", run, output, options)
