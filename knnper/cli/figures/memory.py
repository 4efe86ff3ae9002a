"""``knnper figure memory``: what the size of the memory and its settings do."""

from typing import Annotated

import typer

from knnper.cli.figures.drawing import draw_of_run
from knnper.cli.figures.options import Output, RunFolder, Seed, given


def memory(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: Output,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="capacity (Figure 1), knn-weight (2), neighbors (5), kernel-scale "
            "(7), best-weight (8) or hardware (9); may be repeated.",
            show_default="all",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="M, the new clients.", show_default="the run's unseen ones"),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(
            help="Of the lines of `capacity`; may be repeated.",
            show_default="0.1 0.3 0.5 0.7 1",
        ),
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(
            help="A client's images, on average, in `knn-weight`; may be repeated.",
            show_default="1/50, 1/10, 2/5 and all of those it has",
        ),
    ] = None,
    deals: Annotated[
        int | None,
        typer.Option(help="How often the images are dealt anew.", show_default="3"),
    ] = None,
    seed: Seed = None,
) -> None:
    """Give new clients memories of other sizes and settings (Figures 1, 2, 5, 7-9)."""
    options = given(
        only=only, clients=clients, alpha=alpha, size=size, deals=deals, seed=seed
    )
    draw_of_run("memory", run, output, options)
