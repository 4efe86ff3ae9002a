"""Rows of a comparison in PFLlib's own code and in ours.

Runs an unchanged clone of PFLlib on the same images for each client and from the same
initial weights. The results are compared with the readings of ``python -m papers
rounds`` in the same folder. Nothing is written into the clone. ``docs/reproducing.md``
lists the differences, apart from the order of mini-batches.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from knnper import ConfigError, Examples, Experiment, Problem, RunError
from knnper.cli.options import Overrides
from knnper.cli.terminal import print_shown
from knnper.experiment import TrainingSettings
from knnper.process import with_fixed_threads
from knnper.simulation.batches.comparison import Comparison, read_comparison
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.reports.table import Shown, Table
from knnper.simulation.workbench import Workbench, open_workbench
from papers import rounds
from papers.rounds import Reading

MAIN = Path(__file__).with_name("pfllib_main.py")
INITIAL, REPORT = "initial.npz", "report.json"

# PFLlib's name and options of each method, by our name.
METHODS: dict[str, tuple[str, Callable[[Any], Sequence[object]]]] = {
    "fedavg": ("FedAvg", lambda _: ()),
    "ditto": ("Ditto", lambda settings: ("-mu", settings.prox_weights[0])),
    "fedrep": ("FedRep", lambda settings: ("-pls", settings.head_epochs)),
    "fedproto": ("FedProto", lambda settings: ("-lam", settings.prototype_weight)),
    "fedala": (
        "FedALA",
        lambda settings: (
            *("-et", settings.aggregation_learning_rate),
            *("-s", round(100 * settings.sample_fraction)),
            *("-p", 2 * settings.num_adaptive_layers),  # weight and bias of each layer
        ),
    ),
    "feddbe": (
        "FedDBE",
        lambda settings: ("-klw", settings.mean_weight, "-mo", settings.mean_momentum),
    ),
}
HEADER = (
    "method",
    "last round",
    "PFLlib",
    "best on test",
    "PFLlib",
    "s a round",
    "PFLlib",
)


def arguments_of(bench: Workbench, every: int) -> list[str]:
    """Build the arguments of ``main.py``; raise for settings that it lacks."""
    training, method = bench.experiment.training, bench.experiment.method
    training = replace(training, local_epochs=training.local_epochs or 1)
    same = TrainingSettings(
        num_rounds=training.num_rounds,
        local_epochs=training.local_epochs,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
    )
    if method.name not in METHODS:
        known = ", ".join(METHODS)
        raise _refused("method", f"found {method.name}, expected one of {known}")
    if training != same:
        message = "expected plain SGD, an epoch a round, constant rate, all clients"
        raise _refused("training", message)
    algorithm, options = METHODS[method.name]
    arguments: list[object] = [
        *("-data", name_of(bench), "-ncl", bench.task.spec.num_classes, "-m", "CNN"),
        *("-nc", len(bench.partition.clients), "-dev", "cpu", "-eg", every),
        *("-gr", same.num_rounds, "-ls", same.local_epochs, "-lbs", same.batch_size),
        *("-lr", same.learning_rate, "-algo", algorithm, *options(method.settings)),
    ]
    return [str(argument) for argument in arguments]


def _refused(place: str, message: str) -> ConfigError:
    return ConfigError([Problem(place, f"{message}: PFLlib has no more")], "the row")


def name_of(bench: Workbench) -> str:
    """Return PFLlib's name of the data set."""
    # PFLlib infers the form of the images from the word Cifar10 in the name.
    return f"Cifar100-{fingerprint(bench.partition)[:8]}"


def write_federation(bench: Workbench, folder: Path) -> Path:
    """Write each client's training and test split and the initial weights, once.

    The files ``train/0.npz`` and so on have PFLlib's format: ``data`` is a dictionary
    with the network's inputs ``x``, float32 (n, channels, height, width), and ``y``.
    Validation data is left out.
    """
    place = folder / name_of(bench)
    if place.is_dir():
        return place
    draft = place.with_name(f".{place.name}.{os.getpid()}")

    def write(split: str, number: int, examples: Examples) -> None:
        (draft / split).mkdir(parents=True, exist_ok=True)
        inputs = bench.task.normalize(examples.images).contiguous().numpy()
        data: Any = {"x": inputs, "y": examples.labels.numpy()}
        np.savez_compressed(draft / split / f"{number}.npz", data=data)

    for number, part in enumerate(bench.partition.clients):
        write("train", number, bench.clients.data(part.name).train)
        write("test", number, bench.clients.test(part.name))
    bench.task.model.load(bench.task.initial_weights)
    parameters = bench.task.model.module.parameters()
    np.savez(draft / INITIAL, *(parameter.detach().numpy() for parameter in parameters))
    draft.rename(place)
    return place


def run_pfllib(
    experiment: Experiment, clone: Path, python: str, folder: Path, every: int
) -> None:
    """Run PFLlib in ``folder`` on the data in ``dataset`` beside it."""
    system = clone.absolute() / "system"
    if not (system / "main.py").is_file():
        raise RunError(f"found no {system / 'main.py'}, expected a clone of PFLlib")
    bench = open_workbench(experiment)
    arguments = arguments_of(bench, every)
    initial = write_federation(bench, folder.parent / "dataset") / INITIAL
    folder.mkdir(exist_ok=True)
    # A relative path of the interpreter is relative to our working directory.
    python = str(Path(python).absolute()) if os.sep in python else python
    files = system, initial.absolute(), folder.absolute() / REPORT
    threads = str(experiment.run.threads_per_worker)
    log = folder / "output.txt"
    with log.open("w") as output:
        ended = subprocess.run(
            [python, str(MAIN), *map(str, files), *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        last = log.read_text().splitlines()[-1:]
        raise RunError(f"PFLlib failed, see {log}: {''.join(last)}")


def report_in(folder: Path, method: str) -> tuple[list[Reading], float] | None:
    """Read PFLlib's readings, and the seconds of a round of training."""
    if not (folder / REPORT).is_file():
        return None
    report = json.loads((folder / REPORT).read_text())
    every, test, seconds = report["every"], report["test"], report["seconds"]
    if method == "ditto":
        test = test[1::2]  # global and personal models take turns
        # A round begins with the evaluation of the last rounds, if one is due.
    plain = [value for number, value in enumerate(seconds) if number % every] or seconds
    readings: list[Reading] = [
        {"server_round": every * number, "test": value}
        for number, value in enumerate(test)
    ]
    return readings, fmean(plain or [0.0])


def side_by_side(plan: Comparison, output: Path) -> Shown:
    """Build a table of the rows in both results, each with its first seed."""
    our_readings = rounds.readings_in(plan, output)
    seconds = rounds.seconds_in(plan, output)
    lines = []
    for row, points in plan.variants.items():
        method = points[0].runs[plan.seeds[0]].method.name
        their_report = report_in(output / "pfllib" / row, method)
        if their_report is None or not their_report[0] or row not in our_readings:
            continue
        last = max(their_report[0], key=lambda reading: reading["server_round"])
        best = max(their_report[0], key=lambda reading: reading["test"])
        lines.append(
            (
                points[0].title,
                rounds.cell([our_readings[row][0].last]),
                rounds.cell([last]),
                rounds.cell([our_readings[row][0].best]),
                rounds.cell([best]),
                f"{seconds[row]:.1f}",
                f"{their_report[1]:.1f}",
            )
        )
    table = Table(rounds.TITLE, HEADER, tuple(lines))
    return rounds.write_table(output / "beside_pfllib.md", table)


def pfllib(
    file: Annotated[Path, typer.Argument(metavar="COMPARISON.yaml")],
    rows: Annotated[
        list[str] | None, typer.Argument(help="What PFLlib is to run; else a table.")
    ] = None,
    overrides: Overrides = None,
    clone: Annotated[Path, typer.Option(metavar="FOLDER", help="Its clone.")] = Path(
        "PFLlib"
    ),
    python: Annotated[
        str, typer.Option(help="With what PFLlib needs.")
    ] = sys.executable,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="That of ``papers rounds``.")
    ] = Path("runs/rounds"),
    every: Annotated[int, typer.Option(min=1, help="Rounds between readings.")] = 1,
) -> None:
    """Run rows of a comparison in PFLlib's own code, and show both results."""
    plan = read_comparison(file, overrides or ())
    rounds.require_rows(plan, rows or ())
    for row in rows or ():
        experiment = with_fixed_threads(plan.variants[row][0].runs[plan.seeds[0]])
        folder = output / "pfllib" / row
        folder.mkdir(parents=True, exist_ok=True)
        run_pfllib(experiment, clone, python, folder, every)
    print_shown(side_by_side(plan, output))
