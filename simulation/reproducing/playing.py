"""Protocol files played one after the other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from knnper.config.sections import Experiment
from knnper.machine import usable_cores
from simulation.batch.code import older_code
from simulation.batch.families import folder_of
from simulation.batch.folder import led
from simulation.comparison.comparing import compare, num_runs
from simulation.comparison.plan import Comparison
from simulation.comparison.table import table_of
from simulation.comparison.writing import write_comparison
from simulation.figures.catalogue import OF_EXPERIMENTS, OF_NOTHING, OF_RUNS
from simulation.reporting.runs import load_run
from simulation.reporting.table import as_cells, table_of_run
from simulation.reproducing.failures import forget, reason_of
from simulation.reproducing.figure_file import FigurePlan
from simulation.reproducing.needed_data import MissingDataError, require_data
from simulation.reproducing.own_report import write_own_report
from simulation.reproducing.protocols import Protocol
from simulation.reproducing.records import Making, Records
from simulation.reproducing.single_run import make_run
from simulation.reproducing.watching import Watcher
from simulation.showing import Shown, Table
from simulation.sweep.figures import estimated
from simulation.sweep.plan import Sweep
from simulation.sweep.running import num_steps, run_sweep
from simulation.sweep.writing import write_sweep
from simulation.trained_model import trained_model


@dataclass(frozen=True)
class Played:
    """A file that was played.

    Attributes
    ----------
    protocol
        The file.
    making
        How long it took, and with what.
    shown
        What there is to show; None where it did not come to its end.
    failure
        Why it failed; None where it did not.
    missing
        Why it was left out: its data are not there; None where it was not.
    """

    protocol: Protocol
    making: Making
    shown: Shown | None = None
    failure: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Player:
    """Plays files.

    Attributes
    ----------
    output
        Holds a folder for each of them.
    num_workers
        Processes side by side; None is one a CPU core.
    watcher
        Is told how they get on.
    skips_missing_data
        Whether files whose data are not there are left out, in place of failing.
    """

    output: Path
    num_workers: int | None
    watcher: Watcher
    skips_missing_data: bool = False

    def play_all(self, protocols: Sequence[Protocol]) -> list[Played]:
        """Play the files in their order; one that fails does not stop the others.

        Raises
        ------
        FolderTakenError
            If the output folder is a file.
        RunError
            If another process is at work in it.
        """
        played = []
        with led(self.output):
            for number, protocol in enumerate(protocols, start=1):
                self.watcher.begins(number, len(protocols), protocol)
                played.append(self._play(protocol))
        return played

    def _play(self, protocol: Protocol) -> Played:
        forget(protocol.name, self.output)
        try:
            shown = self._timed(protocol)
        except Exception as error:  # noqa: BLE001 (others may be played to their end)
            return self._not_done(protocol, error)
        return Played(protocol, self._making_of(protocol), shown)

    def _not_done(self, protocol: Protocol, error: Exception) -> Played:
        reason = reason_of(error, protocol.name, self.output)
        self.watcher.fails(protocol, reason)
        making = self._making_of(protocol)
        if self.skips_missing_data and isinstance(error, MissingDataError):
            return Played(protocol, making, missing=reason)
        return Played(protocol, making, failure=reason)

    def _timed(self, protocol: Protocol) -> Shown:
        require_data(protocol.plan)
        records = Records(self.output)
        before, began = records.begin(protocol.name), time.monotonic()
        try:
            return self._shown(protocol)
        finally:
            # Also of what is interrupted: it is not made again.
            records.note(protocol.name, time.monotonic() - began, before)

    def _making_of(self, protocol: Protocol) -> Making:
        return Records(self.output).making_of(protocol.name)

    def _shown(self, protocol: Protocol) -> Shown:
        folder = self.output / protocol.name
        command = ("knnper", "reproduce", str(protocol.path))
        match protocol.plan:
            case Sweep() as sweep:
                return self._sweep(sweep, folder, command)
            case Comparison() as comparison:
                return self._comparison(comparison, folder, command)
            case FigurePlan() as figure:
                return self._figure(figure, folder, command)
            case Experiment() as experiment:
                return self._experiment(experiment, folder, command)

    def _sweep(self, sweep: Sweep, folder: Path, command: Sequence[str]) -> Shown:
        with self.watcher.counting(num_steps(sweep), "steps") as advance:
            outcomes = run_sweep(sweep, folder, self._num_processes, advance, command)
        shown = write_sweep(sweep, outcomes, estimated(outcomes), folder)
        runs = [path for one in outcomes for path in one.runs.values()]
        averages = write_own_report(folder, runs, shown.remarks)
        return shown if shown.charts else replace(shown, charts=averages)

    def _comparison(
        self, comparison: Comparison, folder: Path, command: Sequence[str]
    ) -> Shown:
        with self.watcher.counting(num_runs(comparison), "runs") as advance:
            outcomes = compare(
                comparison, folder, self._num_processes, advance, command
            )
        rows = table_of(outcomes, comparison.reference)
        shown = write_comparison(comparison, outcomes, rows, folder)
        runs = [path for one in outcomes for path in one.runs.values()]
        return replace(shown, charts=write_own_report(folder, runs, shown.remarks))

    def _experiment(
        self, experiment: Experiment, folder: Path, command: Sequence[str]
    ) -> Shown:
        self._run(experiment, folder, command)
        cells = as_cells(table_of_run(load_run(folder)))
        table = Table.of_cells(experiment.name, cells)
        older = tuple(older_code([folder], folder))
        return Shown((table,), write_own_report(folder, [folder], older), older)

    def _figure(self, plan: FigurePlan, folder: Path, command: Sequence[str]) -> Shown:
        name, options = plan.figure, plan.options
        if plan.experiment is None:
            alone = OF_NOTHING[name]
            with self.watcher.drawing(alone.parts) as on_part:
                return alone.make(None, folder, options, on_part)
        if name in OF_EXPERIMENTS:
            training = OF_EXPERIMENTS[name]
            with self.watcher.drawing(training.parts) as on_part:
                return training.make(plan.experiment, folder, options, on_part)
        # Figures of one experiment share its training.
        trained = self._run(plan.experiment, None, command)
        drawn = OF_RUNS[name]
        with self.watcher.drawing(drawn.parts) as on_part:
            shown = drawn.make(trained_model(trained), folder, options, on_part)
        return replace(shown, remarks=(*older_code([trained], trained), *shown.remarks))

    def _run(
        self, experiment: Experiment, path: Path | None, command: Sequence[str]
    ) -> Path:
        """Make a run in a folder; without one in that of its settings."""
        run = experiment.run
        if self.num_workers is not None and run.ray_address is None:
            run = replace(run, num_workers=self.num_workers)
        settings = replace(experiment, run=run)
        place = path or folder_of(settings, self.output)
        with self.watcher.observing() as observer:
            return make_run(settings, place, observer, command).path

    @property
    def _num_processes(self) -> int:
        return self.num_workers or usable_cores()
