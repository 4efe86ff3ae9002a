"""``knnper figure``: figures of the papers."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from knnper.cli.options import ExperimentFile, Overrides
from knnper.cli.output import print_table, say

if TYPE_CHECKING:
    from simulation.figures.folder import OnPart

SECONDS_BETWEEN_LINES = 5.0

figure = typer.Typer(
    name="figure",
    no_args_is_help=True,
    help="Draw a figure of the papers, most with the global model of a finished run.",
)

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
]
Output = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Where numbers and pictures go; a figure that was left there goes on.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random choice.")]


@figure.command()
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
    with _progress() as on_part:
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
    say(f"Numbers and pictures are in {output}")


@figure.command()
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
    with _progress() as on_part:
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
    say(f"Numbers and pictures are in {output}")


@figure.command()
def fedbasis_collapse(
    experiment: ExperimentFile, output: Output, overrides: Overrides = None
) -> None:
    """Train FedBasis with and without what keeps its bases apart (Figure 2)."""
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.figures.collapse_figure import draw_collapse

    settings = read_experiment(experiment, experiment_catalogue(), overrides or ())
    with _progress("variants") as on_part:
        found = draw_collapse(settings, output, on_part)
    header = ("treated", "similarity", "entropy", "accuracy", "unseen")
    rows = [
        (
            variant,
            *(f"{record[name][-1]:.3f}" for name in ("similarity", "entropy")),
            *(
                "" if record[name] is None else f"{100 * record[name]:.1f} %"
                for name in ("accuracy", "unseen_accuracy")
            ),
        )
        for variant, record in found.items()
    ]
    print_table(header, rows)
    say(f"Numbers and pictures are in {output}")


@figure.command()
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
    with _progress("points") as on_part:
        found = draw_three_approaches(settings, output, seed, on_part)
    rows = [
        (title, *(f"{record['test_loss']:.3f}" for record in records))
        for title, records in found.by_samples.items()
    ]
    print_table(("samples per user", *map(str, settings.samples)), rows)
    losses = [f"{record['test_loss']:.3f}" for record in found.by_clusters]
    print_table(("clusters", *map(str, settings.clusters)), [("HypCluster", *losses)])
    say(f"Numbers and pictures are in {output}")


@contextlib.contextmanager
def _progress(parts: str = "clients") -> "Iterator[OnPart]":
    """Yield what draws a bar on a terminal, and writes lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line_writer(say, parts=parts)
        return
    with Progress(*Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task(parts, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def line_writer(
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    parts: str = "clients",
) -> "OnPart":
    """Return what writes a line now and then, with the time that is left.

    Parameters
    ----------
    write
        Takes a line.
    clock
        Returns seconds.
    parts
        What is counted.
    """
    began = last = clock()
    at_first: int | None = None

    def on_part(done: int, total: int) -> None:
        nonlocal at_first, last
        if at_first is None:
            at_first = done
        now = clock()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = ""
        if done > at_first:
            seconds = (now - began) / (done - at_first) * (total - done)
            left = f", {seconds:.0f} s left"
        write(f"{done}/{total} {parts}{left}")

    return on_part
