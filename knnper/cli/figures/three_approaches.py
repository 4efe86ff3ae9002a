"""``knnper figure three-approaches``: clusters, mixed data and mixed models."""

from dataclasses import replace
from typing import Annotated

import typer

from knnper.cli.figures.options import Output, Seed, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.output import print_table


def three_approaches(
    output: Output,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            min=3,
            help="Of each user; may be repeated.",
            show_default="3 5 10 30 100 200",
        ),
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Of HypCluster; may be repeated.", show_default="1 ... 6, 8"
        ),
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="p, the users.")] = 100,
    seed: Seed = 0,
) -> None:
    """Compare clusters, mixed data and mixed models on synthetic users (Figure 2)."""
    from simulation.figures.three_approaches import ThreeApproachesSettings
    from simulation.figures.three_approaches_figure import draw_three_approaches

    default = ThreeApproachesSettings()
    settings = replace(
        default,
        samples=tuple(samples or default.samples),
        clusters=tuple(clusters or default.clusters),
        num_users=users,
    )
    with progress("points") as on_part:
        found = draw_three_approaches(settings, output, seed, on_part)
    rows = [
        (title, *(f"{record['test_loss']:.3f}" for record in records))
        for title, records in found.by_samples.items()
    ]
    print_table(("samples per user", *map(str, settings.samples)), rows)
    losses = [f"{record['test_loss']:.3f}" for record in found.by_clusters]
    print_table(("clusters", *map(str, settings.clusters)), [("HypCluster", *losses)])
    say_where(output)
