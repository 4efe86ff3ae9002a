"""``knnper figure drift``: a shift of the clients' data."""

from typing import Annotated

import typer

from knnper.cli.figures.drawing import draw_of_run
from knnper.cli.figures.options import Output, RunFolder, Seed, given


def drift(  # noqa: PLR0913 (one parameter an option)
    run: RunFolder,
    output: Output,
    clients: Annotated[
        int | None, typer.Option(help="M, the clients.", show_default="100")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="T, batches that arrive.", show_default="100")
    ] = None,
    shift_at: Annotated[
        int | None,
        typer.Option(help="t0, the batches before the shift.", show_default="50"),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Of both Dirichlet draws.", show_default="0.3"),
    ] = None,
    knn_weight: Annotated[
        float | None,
        typer.Option(help="Of all clients.", show_default="each chooses once"),
    ] = None,
    seed: Seed = None,
) -> None:
    """Follow a shift of the clients' data: fixed, FIFO and concatenate (Figure 14)."""
    options = given(
        clients=clients,
        steps=steps,
        shift_at=shift_at,
        alpha=alpha,
        knn_weight=knn_weight,
        seed=seed,
    )
    draw_of_run("drift", run, output, options)
