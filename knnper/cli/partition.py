"""``knnper partition``: who gets which data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.options import AsJson, ExperimentFile, Overrides
from knnper.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from simulation.partition.split import Partition
    from simulation.partition.summary import PartitionSummary

PLOT_FORMATS = (".png", ".pdf", ".svg")
_BARS = " ▁▂▃▄▅▆▇█"

PlotFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Draw clients against labels."),
]
ExportFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write each client's share as an .npz file that a real client reads.",
    ),
]


def partition(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    plot: PlotFile = None,
    export: ExportFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show how an experiment deals the data to its clients; nothing is trained."""
    if plot is not None and plot.suffix not in PLOT_FORMATS:
        expected = ", ".join(PLOT_FORMATS)
        raise typer.BadParameter(f"{plot}: expected a file that ends in {expected}")
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.partition.summary import describe_partition
    from simulation.workbench import open_workbench

    settings = read_experiment(experiment, experiment_catalogue(), overrides or ())
    bench = open_workbench(settings)
    data = bench.clients.dataset
    summary = describe_partition(
        bench.partition, data.train.labels, data.spec.num_classes
    )
    _show(bench.partition, summary, as_json)
    if plot is not None:
        from knnper.cli.partition_plot import draw_partition

        draw_partition(summary.class_counts, data.class_names, plot)
        say(f"The picture is in {plot}")
    if export is not None:
        from simulation.partition.exporting import export_shares

        files = export_shares(data, bench.partition, export)
        say(f"{len(files)} clients' shares and labels.json are in {export}")


def _show(partition: "Partition", summary: "PartitionSummary", as_json: bool) -> None:
    clients = _clients(partition, summary)
    totals = _totals(partition, summary)
    if as_json:
        print_json({**totals, "clients": clients})
        return
    header = ("client", "group", "train", "validation", "test", "labels")
    rows = [
        (
            client["client"],
            "seen" if client["seen"] else "unseen",
            *(str(client[f"num_{split}"]) for split in ("train", "validation", "test")),
            bars(client["class_counts"]),
        )
        for client in clients
    ]
    print_table(header, rows)
    for name, value in totals.items():
        typer.echo(f"{name}: {value}")


def _totals(partition: "Partition", summary: "PartitionSummary") -> dict[str, Any]:
    from simulation.partition.split import fingerprint

    num_seen = sum(client.seen for client in partition.clients)
    return {
        "num_clients": len(partition.clients),
        "num_seen": num_seen,
        "num_unseen": len(partition.clients) - num_seen,
        "num_empty": summary.num_empty,
        "min_size": summary.min_size,
        "median_size": summary.median_size,
        "max_size": summary.max_size,
        "sha256": fingerprint(partition),
    }


def _clients(
    partition: "Partition", summary: "PartitionSummary"
) -> list[dict[str, Any]]:
    return [
        {
            "client": client.name,
            "seen": client.seen,
            "num_train": len(client.train),
            "num_validation": len(client.validation),
            "num_test": len(client.test),
            "class_counts": counts,
        }
        for client, counts in zip(
            partition.clients, summary.class_counts.tolist(), strict=True
        )
    ]


def bars(counts: list[int]) -> str:
    """Return one character a count, in eighths of the largest; a blank for none."""
    largest = max(*counts, 1)
    steps = len(_BARS) - 1
    return "".join(_BARS[-(-count * steps // largest)] for count in counts)
