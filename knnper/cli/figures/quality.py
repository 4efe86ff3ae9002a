"""``knnper figure quality``: what the memory makes of better global models."""

from dataclasses import replace
from typing import Annotated

import typer

from knnper.cli.figures.options import Output, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.options import ExperimentFile, Overrides
from knnper.cli.output import print_table, say


def quality(
    experiment: ExperimentFile,
    output: Output,
    epochs: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            help="Passes over the data after which the model is kept; may be repeated.",
            show_default="0 0.1 0.3 1 3 10 30",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="M, the new clients.", show_default="the unseen ones"),
    ] = None,
    alphas: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha", min=1e-6, help="May be repeated.", show_default="0.1 0.3 1"
        ),
    ] = None,
    deals: Annotated[
        int, typer.Option(min=1, help="How often the images are dealt anew.")
    ] = 3,
    overrides: Overrides = None,
) -> None:
    """Train a model centrally; add the memory at stages of it (Figures 3, 12, 13)."""
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.figures.quality.figure import KINDS, draw_quality
    from simulation.figures.quality.settings import quality_settings

    read = read_experiment(experiment, experiment_catalogue(), overrides or ())
    default = quality_settings(read)
    settings = replace(
        default,
        epochs=tuple(epochs or default.epochs),
        alphas=tuple(alphas or default.alphas),
        num_clients=clients,
        num_deals=deals,
    )
    with progress("stages") as on_part:
        found = draw_quality(read, output, settings, on_part)
    for kind, curves in found.items():
        say(KINDS[kind])
        places = [f"{100 * place:.1f} %" for place in curves[0].x]
        rows = [
            (curve.label, *(f"{100 * mean:.1f} %" for mean in curve.mean))
            for curve in curves
        ]
        print_table(("alpha / global model", *places), rows)
    say_where(output)
