"""``knnper figure quality``: what the memory makes of better global models."""

from typing import Annotated

import typer

from knnper.cli.figures.drawing import draw_of_experiment
from knnper.cli.figures.options import Output, given
from knnper.cli.options import ExperimentFile, Overrides


def quality(
    experiment: ExperimentFile,
    output: Output,
    epochs: Annotated[
        list[float] | None,
        typer.Option(
            help="Passes over the data after which the model is kept; may be repeated.",
            show_default="0 0.1 0.3 1 3 10 30",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="M, the new clients.", show_default="the unseen ones"),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="May be repeated.", show_default="0.1 0.3 1"),
    ] = None,
    deals: Annotated[
        int | None,
        typer.Option(help="How often the images are dealt anew.", show_default="3"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a model centrally; add the memory at stages of it (Figures 3, 12, 13)."""
    options = given(epochs=epochs, clients=clients, alpha=alpha, deals=deals)
    draw_of_experiment("quality", experiment, overrides or (), output, options)
