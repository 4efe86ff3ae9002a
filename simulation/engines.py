"""Run an experiment on the engine that it names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from knnper.process import compute_device
from knnper.server.federation import Federation
from knnper.server.observer import Observer
from knnper.server.run import Conductor
from knnper.server.run_folder import RunFolder
from knnper.simulation.label_counts import keep_label_counts
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, open_workbench, runtime_of


def simulate(
    bench: Workbench, folder: RunFolder, observer: Observer, command: Sequence[str]
) -> Mapping[str, Any]:
    """Run an experiment on the engine it names."""
    if folder.is_finished():
        return folder.results()

    def body(federation: Federation) -> Mapping[str, Any]:
        conductor = Conductor(bench, federation, folder, observer)
        return conductor.lead(bench.roster, command)

    try:
        with folder.locked():
            keep_label_counts(bench.clients, folder.path)
            return _run(bench, folder, body)
    finally:
        observer.finished()


def _run(
    bench: Workbench, folder: RunFolder, body: Callable[[Federation], Mapping[str, Any]]
) -> Mapping[str, Any]:
    if bench.experiment.run.engine == "serial":
        device = compute_device(bench.experiment.run)
        workers = bench
        if device.type != "cpu":
            workers = open_workbench(bench.experiment, device, bench.task.pool)
        return body(SerialFederation(runtime_of(workers, folder.path)))
    # Ray takes seconds to import, which the serial engine need not wait for.
    from knnper.simulation.flower_engine import run_on_flower

    return run_on_flower(bench, folder.path, body)
