"""``knnper simulate``: an experiment with virtual clients on this machine."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.errors import INTERRUPTED, system_error
from knnper.cli.options import (
    AsJson,
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    require_resume,
)
from knnper.cli.output import print_json, print_table, say
from knnper.cli.resumable import how_to_go_on
from knnper.cli.typed import typed_command
from knnper.config.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from server.run_folder import RunFolder
    from simulation.workbench import Workbench


class Engine(StrEnum):
    """What plays the clients."""

    FLOWER = "flower"
    SERIAL = "serial"


ChosenEngine = Annotated[
    Engine | None, typer.Option(help="Shorthand for --set run.engine=...")
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


def simulate(  # noqa: PLR0913 (one parameter an option)
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    engine: ChosenEngine = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train, personalise and evaluate virtual clients; write results to a folder."""
    if (experiment is None) == (resume is None):
        raise typer.BadParameter("give either EXPERIMENT.yaml or --resume DIR")
    require_resume(from_round, resume)
    changes = [*(overrides or ()), *_shorthands(engine, workers, ray_address)]
    if resume is not None:
        if output is not None or overwrite:
            raise typer.BadParameter("--resume goes with neither --output, --overwrite")
        bench, folder = _take_up(resume, changes)
        if from_round is not None:
            folder.go_back(from_round)
    elif experiment is not None:
        bench, folder = _start(experiment, changes, output, overwrite)
    with _telling_what_next(folder):
        results = _run(bench, folder)
    _show(results, folder, as_json)


def _shorthands(
    engine: Engine | None, workers: int | None, ray_address: str | None
) -> Iterator[str]:
    if engine is not None:
        yield f"run.engine={engine}"
    if workers is not None:
        yield f"run.num_workers={workers}"
    if ray_address is not None:
        yield f"run.ray_address={json.dumps(ray_address)}"


def _start(
    path: Path, changes: Sequence[str], output: Path | None, overwrite: bool
) -> "tuple[Workbench, RunFolder]":
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.config.loading import read_experiment
    from knnper.machine import with_fixed_threads
    from server.run_folder import RunFolder
    from simulation.batch.code import sign
    from simulation.batch.inputs import inputs_of, keep_inputs
    from simulation.catalogue import experiment_catalogue
    from simulation.workbench import open_workbench

    settings = read_experiment(path, experiment_catalogue(), changes)
    settings = with_fixed_threads(settings)
    place = output or Path("runs") / settings.name
    RunFolder.require_free(place, overwrite=overwrite)
    # Whatever is wrong with data or model shows before an earlier run is deleted.
    bench = open_workbench(settings)
    inputs = inputs_of(settings)
    folder = RunFolder.create(place, settings, overwrite=overwrite)
    sign(folder.path)
    keep_inputs(folder.path, inputs)
    return bench, folder


def _take_up(path: Path, changes: Sequence[str]) -> "tuple[Workbench, RunFolder]":
    from server.run_folder import RunFolder
    from simulation.catalogue import experiment_catalogue
    from simulation.workbench import open_workbench

    folder = RunFolder.open(path)
    settings = folder.experiment(experiment_catalogue(), changes)
    return open_workbench(settings), folder


def _run(bench: "Workbench", folder: "RunFolder") -> Mapping[str, Any]:
    from knnper.cli.progress import progress_observer
    from simulation.runner import simulate as run_simulation

    with progress_observer() as observer:
        return run_simulation(bench, folder, observer, typed_command())


def _show(results: Mapping[str, Any], folder: "RunFolder", as_json: bool) -> None:
    from simulation.reporting.runs import load_run
    from simulation.reporting.table import as_cells, table_of_run

    if as_json:
        print_json(results)
        return
    header, *rows = as_cells(table_of_run(load_run(folder.path)))
    print_table(header, rows)
    say(f"Everything about this run is in {folder.path}")


@contextlib.contextmanager
def _telling_what_next(folder: "RunFolder") -> Iterator[None]:
    """Add to an error how the run can go on."""
    try:
        yield
    except (CheckpointError, BrokenPipeError):
        raise
    except (RunError, OSError) as error:
        told = system_error(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"{told}\n{how_to_go_on('simulate', folder.path)}") from error
    except KeyboardInterrupt as error:
        say(f"Interrupted. {how_to_go_on('simulate', folder.path)}")
        raise typer.Exit(INTERRUPTED) from error
