"""The commands of simulation: ``knnper init``, ``partition`` and ``simulate``."""

import contextlib
import json
import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.errors import INTERRUPTED, how_to_resume, system_error, typed_command
from knnper.cli.options import (
    AsJson,
    ExperimentFile,
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    require_start,
)
from knnper.cli.terminal import print_json, print_table, say, show_run, tell
from knnper.errors import CheckpointError, FolderTakenError, OwnCodeError, RunError
from knnper.server.observer import progress_observer

# Modules that load torch are imported inside functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.server.run_folder import RunFolder
    from knnper.simulation.partition.clients import Partition
    from knnper.simulation.workbench import Workbench

_EXPERIMENT = Path(__file__).parent / "new_experiment"
_COMPARISON = Path(__file__).parent / "new_comparison"
NewFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A new folder, or an empty one.")
]
AsComparison = Annotated[
    bool, typer.Option("--compare", help="Create a comparison of methods instead.")
]
_LARGEST_BUBBLE = 120.0  # square points
_INCHES_PER_CLIENT, _INCHES_PER_CLASS = 0.12, 0.22
PLOT_FORMATS = (".png", ".pdf", ".svg")
_BARS = " ▁▂▃▄▅▆▇█"
PlotFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Draw a chart of clients and labels."),
]
ExportFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write each client's data as an .npz file for real clients.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Shorthand for --set run.num_workers=...")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this Ray cluster. Shorthand for --set run.ray_address=...",
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME")
]
ContinueFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Continue the finished run in this folder to N rounds in all, in the "
        "folder of --output: --set training.num_rounds=N.",
    ),
]


def init(folder: NewFolder, compare: AsComparison = False) -> None:
    """Create a folder with an experiment, your own network and a README."""
    from knnper.settings import is_name

    name = folder.absolute().name
    if not is_name(name):
        raise typer.BadParameter(
            f"{name!r}: expected letters, digits, '.', '_' and '-', a letter or digit "
            "first: the folder names the experiment"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderTakenError(f"{folder} is not empty; choose a new folder")
    template, file, command = _EXPERIMENT, "experiment.yaml", "simulate"
    if compare:
        template, file, command = _COMPARISON, "comparison.yaml", "compare"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (template / file, template / "README.md", _EXPERIMENT / "model.py"):
        text = path.read_text(encoding="utf-8")
        for standing_in in ("my-experiment", "my-comparison"):
            text = text.replace(standing_in, name)
        (folder / path.name).write_text(text, encoding="utf-8")
    say(f"Next: knnper {command} {shlex.quote(str(folder / file))}")


def partition(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    plot: PlotFile = None,
    export: ExportFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show the partition of an experiment, without training."""
    if plot is not None and plot.suffix not in PLOT_FORMATS:
        expected = ", ".join(PLOT_FORMATS)
        raise typer.BadParameter(f"{plot}: expected a file that ends in {expected}")
    from knnper.experiment_file import read_experiment
    from knnper.process import import_extra
    from knnper.simulation.catalogue import experiment_catalogue
    from knnper.simulation.label_counts import count_labels
    from knnper.simulation.workbench import open_workbench

    if plot is not None:
        import_extra("matplotlib", "report", "--plot")
    settings = read_experiment(experiment, experiment_catalogue(), overrides or ())
    bench = open_workbench(settings)
    data = bench.dataset
    counts = count_labels(bench.clients).local
    _show(bench.partition, counts, data.num_skipped, as_json)
    if plot is not None:
        _draw(counts, data.class_names, plot)
        say(f"The chart is in {plot}")
    if export is not None:
        from knnper.simulation.partition.export import export_shares

        files = export_shares(data, bench.partition, export)
        say(f"{len(files)} clients' data and labels.json are in {export}")


def _show(partition: "Partition", counts: Any, num_skipped: int, as_json: bool) -> None:
    import numpy as np
    import torch

    from knnper.datastore.class_prior import label_information
    from knnper.simulation.partition.split import fingerprint

    sizes = counts.sum(axis=1)
    clients = [
        {
            "client": client.shown,
            "seen": client.seen,
            "num_train": len(client.train),
            "num_validation": len(client.validation),
            "num_test": len(client.test),
            "class_counts": of_client,
        }
        for client, of_client in zip(partition.clients, counts.tolist(), strict=True)
    ]
    num_seen = sum(client.seen for client in partition.clients)
    totals = {
        "num_clients": len(clients),
        "num_seen": num_seen,
        "num_unseen": len(clients) - num_seen,
        "num_empty": int((sizes == 0).sum()),
        "min_size": int(sizes.min()),
        "median_size": float(np.median(sizes)),
        "max_size": int(sizes.max()),
        "label_information": round(label_information(torch.from_numpy(counts)), 3),
        "num_skipped": num_skipped,
        "sha256": fingerprint(partition),
    }
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
        tell(f"{name}: {value}")


def _draw(class_counts: Any, class_names: Sequence[str], path: Path) -> None:
    """Draw a bubble for each client and label, its area the number of examples."""
    import numpy as np
    from matplotlib.figure import Figure

    num_clients, num_classes = class_counts.shape
    width = min(max(5.0, _INCHES_PER_CLIENT * num_clients), 40.0)
    height = min(max(3.0, _INCHES_PER_CLASS * num_classes), 30.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    clients, classes = np.nonzero(class_counts)
    counts = class_counts[clients, classes]
    areas = _LARGEST_BUBBLE * counts / max(counts.max(initial=1), 1)
    axes.scatter(clients, classes, s=areas, c=classes, cmap="tab20", linewidths=0)
    axes.set_yticks(range(num_classes), class_names)
    axes.set(xlabel="client", ylabel="label")
    axes.set_title(f"{num_clients} clients, {counts.sum()} examples")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"the chart {path} cannot be written: {error}") from error


def bars(counts: list[int]) -> str:
    """Return a bar of one character for each count, in eighths of the largest."""
    largest = max(*counts, 1)
    steps = len(_BARS) - 1
    return "".join(_BARS[-(-count * steps // largest)] for count in counts)


class Engine(StrEnum):
    """An engine that runs the clients."""

    FLOWER = "flower"
    SERIAL = "serial"


ChosenEngine = Annotated[
    Engine | None, typer.Option(help="Shorthand for --set run.engine=...")
]


def simulate(
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    engine: ChosenEngine = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    continue_from: ContinueFrom = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train, personalise and evaluate virtual clients; write results to a folder."""
    if continue_from is None:
        require_start(experiment, resume, from_round, output, overwrite)
    else:
        _require_continuation(experiment, resume, from_round)
    shorthands = {
        "engine": engine,
        "num_workers": workers,
        "ray_address": None if ray_address is None else json.dumps(ray_address),
    }
    changes = list(overrides or ())
    changes += [
        f"run.{k}={value}" for k, value in shorthands.items() if value is not None
    ]
    from knnper.simulation.engines import simulate as run_simulation

    if continue_from is not None:
        bench, folder = _continued(continue_from, changes, output, overwrite)
    else:
        bench, folder = _opened(
            experiment, changes, output, resume, from_round, overwrite
        )
    with _adding_how_to_resume(folder), progress_observer() as observer:
        results = run_simulation(bench, folder, observer, typed_command())
    if as_json:
        print_json(results)
        return
    show_run(folder.path)


def _require_continuation(
    experiment: Path | None, resume: Path | None, from_round: int | None
) -> None:
    if (experiment, resume, from_round) != (None, None, None):
        raise typer.BadParameter(
            "--continue-from goes with neither EXPERIMENT.yaml, --resume nor "
            "--from-round"
        )


def _continued(
    source: Path, changes: Sequence[str], output: Path | None, overwrite: bool
) -> "tuple[Workbench, RunFolder]":
    """Open a new folder that continues a finished run."""
    if output is None:
        raise typer.BadParameter("--continue-from needs --output, a new folder")
    from knnper.simulation.continuation import begin_continuation

    return begin_continuation(source, changes, output, overwrite=overwrite)


def _opened(
    experiment: Path | None,
    changes: Sequence[str],
    output: Path | None,
    resume: Path | None,
    from_round: int | None,
    overwrite: bool,
) -> "tuple[Workbench, RunFolder]":
    """Open the folder of a new run, or of one that is resumed."""
    from knnper.simulation.interface import begin, reopen

    if resume is None:
        assert experiment is not None, "checked by require_start"
        return begin(experiment, changes, output, overwrite=overwrite)
    bench, folder = reopen(resume, changes)
    if from_round is not None:
        folder.go_back(from_round)
    return bench, folder


@contextlib.contextmanager
def _adding_how_to_resume(folder: "RunFolder") -> Iterator[None]:
    """Add to an error how to resume the run."""
    try:
        yield
    except (CheckpointError, BrokenPipeError):
        raise
    except (RunError, OwnCodeError, OSError) as error:
        reason = system_error(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"{reason}\n{how_to_resume('simulate', folder.path)}") from error
    except KeyboardInterrupt as error:
        say(f"Interrupted. {how_to_resume('simulate', folder.path)}")
        raise typer.Exit(INTERRUPTED) from error
