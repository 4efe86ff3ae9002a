"""``knnper figure drift``: a shift of the clients' data."""

from typing import Annotated

import typer

from knnper.cli.figures.options import Output, RunFolder, Seed, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.output import print_table


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
    with progress() as on_part:
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
    say_where(output)
