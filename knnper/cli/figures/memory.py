"""``knnper figure memory``: what the size of the memory and its settings do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.figures.options import Output, RunFolder, Seed, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.output import print_table, say

if TYPE_CHECKING:
    from simulation.figures.curves import Curve


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
        typer.Option(
            min=1, help="M, the new clients.", show_default="the run's unseen ones"
        ),
    ] = None,
    alphas: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha",
            min=1e-6,
            help="Of the lines of `capacity`; may be repeated.",
            show_default="0.1 0.3 0.5 0.7 1",
        ),
    ] = None,
    sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--size",
            min=1,
            help="A client's images, on average, in `knn-weight`; may be repeated.",
            show_default="1/50, 1/10, 2/5 and all of those it has",
        ),
    ] = None,
    deals: Annotated[
        int, typer.Option(min=1, help="How often the images are dealt anew.")
    ] = 3,
    seed: Seed = 0,
) -> None:
    """Give new clients memories of other sizes and settings (Figures 1, 2, 5, 7-9)."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from simulation.figures.memory.figure import draw_memory
    from simulation.figures.memory.panels import PANELS
    from simulation.figures.memory.settings import memory_settings
    from simulation.trained_model import trained_model

    model = trained_model(run)
    settings = memory_settings(model, clients, tuple(alphas or ()), tuple(sizes or ()))
    settings = replace(settings, num_deals=deals)
    with progress("deals") as on_part:
        found = draw_memory(
            model, output, settings, seed, tuple(only or PANELS), on_part
        )
    for name, curves in found.items():
        say(PANELS[name].title)
        _print_curves(PANELS[name].line_name, curves)
    say_where(output)


def _print_curves(line_name: str, curves: "Sequence[Curve]") -> None:
    print_table(
        (line_name, *(f"{place:g}" for place in curves[0].x)),
        [(curve.label, *(f"{mean:.3f}" for mean in curve.mean)) for curve in curves],
    )
