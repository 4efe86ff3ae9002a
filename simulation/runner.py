"""One experiment from start, or from where it was left, to its results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from knnper.machine import compute_device
from server.conduct import Conductor
from server.federation import Federation
from server.observer import Observer
from server.run_folder import RunFolder
from simulation.client_runtime import runtime_of
from simulation.label_counts import keep_label_counts
from simulation.serial_engine import SerialFederation
from simulation.workbench import Workbench, open_workbench


def simulate(
    bench: Workbench, folder: RunFolder, observer: Observer, command: Sequence[str]
) -> Mapping[str, Any]:
    """Run an experiment on the engine it names.

    Parameters
    ----------
    bench
        What to run.
    folder
        Where everything is written; a run that was interrupted goes on from there.
    observer
        Is told of every step.
    command
        What the user typed, for the manifest.

    Returns
    -------
    Mapping
        The content of ``results.json``.

    Raises
    ------
    RunError
        If the run cannot go on, or another process leads it.
    """
    if folder.is_finished():
        return folder.results()

    def body(federation: Federation) -> Mapping[str, Any]:
        conductor = Conductor(bench, federation, folder, observer)
        return conductor.lead(bench.roster, command)

    try:
        with folder.locked():
            keep_label_counts(bench.clients, folder.path)
            return _play(bench, folder, body)
    finally:
        observer.finished()


def _play(
    bench: Workbench,
    folder: RunFolder,
    body: Callable[[Federation], Mapping[str, Any]],
) -> Mapping[str, Any]:
    if bench.experiment.run.engine == "serial":
        device = compute_device(bench.experiment.run)
        players = bench
        if device.type != "cpu":
            players = open_workbench(bench.experiment, device, bench.task.pool)
        return body(SerialFederation(runtime_of(players, folder.path)))
    # Ray takes seconds to import, which the serial engine need not wait for.
    from simulation.flower_engine import run_on_flower

    return run_on_flower(bench, folder.path, body)
