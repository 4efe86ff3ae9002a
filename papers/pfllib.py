"""Rows of a comparison in PFLlib's own code, beside ours.

A clone of PFLlib is run as it is, on the same images for each client and from the same
initial weights, beside the readings that ``python -m papers rounds`` left in the same
folder. Nothing is written into the clone. What differs between the two, but for the
order of mini-batches, is listed in ``docs/reproducing.md``.
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

from knnper.cli.terminal import Overrides, print_shown
from knnper.data.examples import Examples
from knnper.errors import ConfigError, Problem, RunError
from knnper.experiment import Experiment, TrainingSettings
from knnper.process import with_fixed_threads
from knnper.simulation.batches.comparison import (
    Comparison,
    read_comparison,
)
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.reports.table import Shown, Table
from knnper.simulation.workbench import Workbench, open_workbench
from papers import rounds
from papers.rounds import Reading

MAIN = Path(__file__).with_name("pfllib_main.py")
INITIAL, REPORT = "initial.npz", "report.json"

# By our name of a method, PFLlib's and its options.
METHODS: dict[str, tuple[str, Callable[[Any], Sequence[object]]]] = {
    "fedavg": ("FedAvg", lambda _: ()),
    "ditto": ("Ditto", lambda one: ("-mu", one.prox_weights[0])),
    "fedrep": ("FedRep", lambda one: ("-pls", one.head_epochs)),
    "fedproto": ("FedProto", lambda one: ("-lam", one.prototype_weight)),
    "fedala": (
        "FedALA",
        lambda one: (
            *("-et", one.aggregation_learning_rate),
            *("-s", round(100 * one.sample_fraction)),
            *("-p", 2 * one.num_adaptive_layers),  # weight and bias of each
        ),
    ),
    "feddbe": (
        "FedDBE",
        lambda one: ("-klw", one.mean_weight, "-mo", one.mean_momentum),
    ),
}


def arguments_of(bench: Workbench, every: int) -> list[str]:
    """Return what ``main.py`` is told; refuse what it cannot do."""
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
    told: list[object] = [
        *("-data", name_of(bench), "-ncl", bench.task.spec.num_classes, "-m", "CNN"),
        *("-nc", len(bench.partition.clients), "-dev", "cpu", "-eg", every),
        *("-gr", same.num_rounds, "-ls", same.local_epochs, "-lbs", same.batch_size),
        *("-lr", same.learning_rate, "-algo", algorithm, *options(method.settings)),
    ]
    return [str(one) for one in told]


def _refused(place: str, message: str) -> ConfigError:
    return ConfigError([Problem(place, f"{message}: PFLlib has no more")], "the row")


def name_of(bench: Workbench) -> str:
    """Return what PFLlib calls the split."""
    # By "Cifar10" it knows what images its network gets.
    return f"Cifar100-{fingerprint(bench.partition)[:8]}"


def write_federation(bench: Workbench, folder: Path) -> Path:
    """Write each client's training and test split, and the initial weights, once.

    ``train/0.npz`` and so on, as PFLlib has them: ``data`` is a dictionary of ``x``,
    float32 (n, channels, height, width) as the network gets them, and ``y``. What is
    held out for validation is not there.
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
    np.savez(draft / INITIAL, *(one.detach().numpy() for one in parameters))
    draft.rename(place)
    return place


def run_pfllib(
    experiment: Experiment, clone: Path, python: str, own: Path, every: int
) -> None:
    """Run PFLlib in the folder ``own``, on what lies in ``dataset`` beside it."""
    system = clone.absolute() / "system"
    if not (system / "main.py").is_file():
        raise RunError(f"found no {system / 'main.py'}, expected a clone of PFLlib")
    bench = open_workbench(experiment)
    told = arguments_of(bench, every)
    initial = write_federation(bench, own.parent / "dataset") / INITIAL
    own.mkdir(exist_ok=True)
    # Given by its path, it is meant as seen from here, not from that folder.
    python = str(Path(python).absolute()) if os.sep in python else python
    files = system, initial.absolute(), own.absolute() / REPORT
    threads = str(experiment.run.threads_per_worker)
    log = own / "output.txt"
    with log.open("w") as output:
        ended = subprocess.run(
            [python, str(MAIN), *map(str, files), *told],
            cwd=own,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        last = log.read_text().splitlines()[-1:]
        raise RunError(f"PFLlib failed, see {log}: {''.join(last)}")


def report_in(own: Path, method: str) -> tuple[list[Reading], float] | None:
    """Return PFLlib's readings, and the seconds of a round of training."""
    if not (own / REPORT).is_file():
        return None
    report = json.loads((own / REPORT).read_text())
    every, test, seconds = report["every"], report["test"], report["seconds"]
    if method == "ditto":
        test = test[1::2]  # of the global model and of the personal ones in turn
    # Each round begins with the evaluation of those before it, where one is due.
    plain = [one for number, one in enumerate(seconds) if number % every] or seconds
    readings: list[Reading] = [
        {"server_round": every * number, "test": one} for number, one in enumerate(test)
    ]
    return readings, fmean(plain or [0.0])


HEADER = (
    *(
        "method",
        "last round",
        "PFLlib",
        "best on test",
        "PFLlib",
        "s a round",
        "PFLlib",
    ),
)


def side_by_side(plan: Comparison, output: Path) -> Shown:
    """Return a table of the rows that both have made, each with its first seed."""
    ours, seconds = rounds.readings_in(plan, output), rounds.seconds_in(plan, output)
    lines = []
    for row, points in plan.variants.items():
        method = points[0].runs[plan.seeds[0]].method.name
        theirs = report_in(output / "pfllib" / row, method)
        if theirs is None or not theirs[0] or row not in ours:
            continue
        last = max(theirs[0], key=lambda one: one["server_round"])
        best = max(theirs[0], key=lambda one: one["test"])
        lines.append(
            (
                points[0].title,
                *(rounds.cell([ours[row][0].last]), rounds.cell([last])),
                *(rounds.cell([ours[row][0].best]), rounds.cell([best])),
                *(f"{seconds[row]:.1f}", f"{theirs[1]:.1f}"),
            )
        )
    table = Table(rounds.TITLE, HEADER, tuple(lines))
    return rounds.left_in(output / "beside_pfllib.md", table)


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
    """Run rows of a comparison in PFLlib's own code; show both sides."""
    plan = read_comparison(file, overrides or ())
    rounds.require_rows(plan, rows or ())
    for row in rows or ():
        experiment = with_fixed_threads(plan.variants[row][0].runs[plan.seeds[0]])
        own = output / "pfllib" / row
        own.mkdir(parents=True, exist_ok=True)
        run_pfllib(experiment, clone, python, own, every)
    print_shown(side_by_side(plan, output))
