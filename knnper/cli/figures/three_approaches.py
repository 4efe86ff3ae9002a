"""``knnper figure three-approaches``: clusters, mixed data and mixed models."""

from typing import Annotated

import typer

from knnper.cli.figures.drawing import draw_of_nothing
from knnper.cli.figures.options import Output, Seed, given


def three_approaches(
    output: Output,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            help="Of each user; may be repeated.",
            show_default="3 5 10 30 100 200",
        ),
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            help="Of HypCluster; may be repeated.", show_default="1 2 3 4 5 6 8"
        ),
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="p, the users.", show_default="100")
    ] = None,
    seed: Seed = None,
) -> None:
    """Compare clusters, mixed data and mixed models on synthetic users (Figure 2)."""
    options = given(samples=samples, clusters=clusters, users=users, seed=seed)
    draw_of_nothing("three-approaches", output, options)
