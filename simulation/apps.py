"""The Flower app of the simulation: what ``flwr run .`` starts."""

import logging
import threading
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from knnper.config.loading import read_experiment
from knnper.config.sections import Experiment
from server.observer import LoggingObserver
from simulation.catalogue import experiment_catalogue
from simulation.client_runtime import client_app
from simulation.flower_engine import carrier_folder, flower_federation
from simulation.machine import with_fixed_threads
from simulation.report import as_markdown, comparison_table, load_run
from simulation.run_folder import RunFolder
from simulation.runner import conduct
from simulation.workbench import open_workbench

__all__ = ["client_app", "server_app"]

# Flower shows, and streams to `flwr run --stream`, what is written to this log.
log = logging.getLogger("flwr")

APP_FOLDER = Path(__file__).resolve().parent.parent

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration names.

    The same server and clients as `knnper simulate` leads; results are the same.
    """
    experiment = _experiment(context)
    output = str(context.run_config["output"]) or f"runs/{experiment.name}"
    path = Path(output).expanduser().resolve()
    overwrite = bool(context.run_config["overwrite"])
    RunFolder.require_free(path, overwrite=overwrite)
    bench = open_workbench(experiment)
    folder = RunFolder.create(path, experiment, overwrite=overwrite)
    observer = LoggingObserver(log)
    with folder.locked(), carrier_folder(experiment.run) as shared:
        federation = flower_federation(grid, bench, path, shared, threading.Event())
        try:
            conduct(bench, federation, folder, observer, ["flwr", "run"])
        finally:
            observer.finished()
    log.info("\n%s", as_markdown(comparison_table([load_run(path)])))
    log.info("everything about this run is in %s", path)


def _experiment(context: Context) -> Experiment:
    """Return the experiment; a relative path is looked up in the app's folder."""
    path = APP_FOLDER / str(context.run_config["experiment"])
    overrides = [part for part in str(context.run_config["set"]).split(";") if part]
    experiment = read_experiment(path, experiment_catalogue(), overrides)
    return with_fixed_threads(experiment)
