"""Make files of figures, comparisons, sweeps and experiments."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper import DataError, Experiment, KnnPerError, RunError, Settings
from knnper.cli.counters import run_counter
from knnper.cli.terminal import say
from knnper.data.catalogue import load_data
from knnper.data.leaf import FemnistHubSettings
from knnper.data.torchvision_sets import DownloadSettings
from knnper.errors import FolderTakenError
from knnper.experiment_file import results_identity
from knnper.files import write_atomically
from knnper.process import known_precision, usable_cores, with_fixed_threads
from knnper.server.observer import Observer, progress_observer
from knnper.server.run_folder import EXPERIMENT, RunFolder
from knnper.settings import Choice
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.folder import locked_folder
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.progress import Advance, Progress, seconds_left
from knnper.simulation.batches.runner import folder_of, num_steps, run_batch
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.batches.tables import rows_of
from knnper.simulation.catalogue import experiment_catalogue, require_central
from knnper.simulation.engines import simulate
from knnper.simulation.origin import (
    inputs_of,
    keep_inputs,
    older_code,
    require_inputs,
    sign,
)
from knnper.simulation.reports.accuracy_table import tables_of_run
from knnper.simulation.reports.pages import as_html, write_text
from knnper.simulation.reports.report import report_of
from knnper.simulation.reports.sections import write_figures
from knnper.simulation.reports.table import Chart, Shown, Table
from knnper.simulation.trained_model import TrainedModel, trained_model
from knnper.simulation.workbench import open_workbench
from papers.catalogue import FIGURES, RUN, FigurePlan, make_figure
from papers.durations import TimeRecords
from papers.figures import OnPart
from papers.files import ERRORS, File, Plan
from papers.report import COMMAND, PAGE, Made


class MissingDataError(DataError):
    """Raised if the data of a file are missing on this machine."""


def require_data(plan: Plan) -> None:
    """Raise if data of a plan cannot be loaded."""
    # A list, since settings need not be hashable; there are few different settings.
    loaded = list[Choice[Settings]]()
    for experiment in _experiments_of(plan):
        require_central(experiment)
        data = experiment.data
        if data in loaded:
            continue
        loaded.append(data)
        try:
            load_data(data)
        except DataError as error:
            if _is_elsewhere(data.settings):
                raise MissingDataError(str(error)) from error
            raise


def _is_elsewhere(settings: Settings) -> bool:
    """Test whether data cannot be loaded because they are missing."""
    if isinstance(settings, DownloadSettings | FemnistHubSettings):
        return True
    places = (getattr(settings, name, None) for name in ("root", "path"))
    return any(
        isinstance(place, str) and not Path(place).expanduser().exists()
        for place in places
    )


def _experiments_of(plan: Plan) -> Iterator[Experiment]:
    match plan:
        case Experiment():
            yield plan
        case Sweep() | Comparison():
            yield from plan.experiments
        case FigurePlan(experiment=Experiment() as experiment):
            yield experiment


def make_run(
    experiment: Experiment,
    path: Path,
    observer: Observer,
    command: Sequence[str] = COMMAND,
) -> RunFolder:
    """Return the folder of a finished run; make or resume it if necessary."""
    known_precision(experiment.training.precision)
    inputs = inputs_of(experiment)
    require_inputs(path, inputs)
    if (path / EXPERIMENT).is_file():
        folder = RunFolder.open(path)
        begun = folder.experiment(experiment_catalogue())
        if experiment.run.threads_per_worker == "auto":
            threads = begun.run.threads_per_worker
            run = replace(experiment.run, threads_per_worker=threads)
            experiment = replace(experiment, run=run)
        if results_identity(begun) != results_identity(experiment):
            raise FolderTakenError(
                f"{path} holds a run with other settings; delete it to run the file as "
                "it is now, or choose another folder with --output"
            )
    else:
        experiment = with_fixed_threads(experiment)
        folder = RunFolder.create(path, experiment)
    if folder.is_finished():
        return folder
    keep_inputs(path, inputs)
    sign(path)
    simulate(open_workbench(experiment), folder, observer, command)
    return folder


@contextlib.contextmanager
def progress(noun: str) -> Iterator[OnPart]:
    """Yield a callback that shows the finished parts of a figure and the time left."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        num_before = 0
        advance: Callable[[Progress], None] | None = None

        def on_part(done: int, total: int) -> None:
            nonlocal num_before, advance
            if advance is None:
                # The first call reports the parts that an earlier command finished.
                num_before = done
                advance = stack.enter_context(run_counter(total, noun))
            now = time.monotonic()
            remaining = seconds_left(began, now, done, total, num_before)
            advance(Progress(done, total, num_before, remaining))

        yield on_part


class Watcher:
    """Writes a line before each file, and shows progress bars."""

    def begins(self, number: int, total: int, file: File) -> None:
        """Announce the next file."""
        say(f"{number} of {total}  {file.name} ({file.kind})")

    def fails(self, file: File, reason: str) -> None:
        """Report why a file is not made."""
        say(f"{file.name} is not done: {reason}")

    def counting(self, total: int, noun: str) -> AbstractContextManager[Advance]:
        """Show the bar of a sweep or a comparison."""
        return run_counter(total, noun)

    def observing(self) -> AbstractContextManager[Observer]:
        """Show the bars of a run."""
        return progress_observer()

    def drawing(self, parts: str) -> AbstractContextManager[OnPart]:
        """Show the bar of a figure."""
        return progress(parts)


@dataclass(frozen=True)
class Maker:
    """Makes files."""

    output: Path
    num_workers: int | None
    watcher: Watcher
    skips_missing_data: bool = False

    def make_all(self, files: Sequence[File]) -> list[Made]:
        """Make the files in order; a failure does not stop the others."""
        results = []
        with locked_folder(self.output):
            for number, file in enumerate(files, start=1):
                self.watcher.begins(number, len(files), file)
                results.append(self._make(file))
        return results

    def _make(self, file: File) -> Made:
        # A folder with nothing but a traceback would look like a result.
        place = self.output / ERRORS / f"{file.name}.txt"
        place.unlink(missing_ok=True)
        records = TimeRecords(self.output)
        result = dict[str, Any]()
        try:
            require_data(file.plan)
            before = records.begin(file.name)
            began = time.monotonic()
            try:
                result["shown"] = self._shown(file)
            finally:
                # Also of what is interrupted: it is not made again.
                records.note(file.name, time.monotonic() - began, before)
        except Exception as error:  # noqa: BLE001 (continue with other files)
            reason = _reason_of(error, place)
            self.watcher.fails(file, reason)
            skipped = self.skips_missing_data and isinstance(error, MissingDataError)
            result["missing" if skipped else "failure"] = reason
        return Made(file, self.output, records.time_of(file.name), **result)

    def _shown(self, file: File) -> Shown:
        folder, command = self.output / file.name, (*COMMAND, str(file.path))
        num_processes = self.num_workers or usable_cores()
        match file.plan:
            case (Sweep() | Comparison()) as plan:
                with self.watcher.counting(num_steps(plan), "steps") as advance:
                    rows = run_batch(plan, folder, num_processes, advance, command)
                shown = write_batch(plan, rows, rows_of(plan, rows), folder)
                runs = [path for row in rows for path in row.runs.values()]
                averages = write_own_report(folder, runs, shown.remarks)
                return shown if shown.charts else replace(shown, charts=averages)
            case Experiment() as experiment:
                self._run(experiment, folder, command)
                older = tuple(older_code([folder], folder))
                charts = write_own_report(folder, [folder], older)
                tables = tuple(
                    Table.of_cells(experiment.name, cells)
                    for cells in tables_of_run(folder)
                )
                return Shown(tables, charts, older)
            case FigurePlan() as figure:
                return self._figure(figure, folder, command)

    def _figure(self, plan: FigurePlan, folder: Path, command: Sequence[str]) -> Shown:
        figure = FIGURES[plan.figure]
        remarks = list[str]()
        subject: TrainedModel | Experiment | None = plan.experiment
        if figure.needs == RUN and plan.experiment is not None:
            # Figures of the same experiment share its training.
            path = self._run(plan.experiment, None, command)
            subject = trained_model(path)
            remarks = list(older_code([path], path))
        with self.watcher.drawing(figure.parts) as on_part:
            shown = make_figure(plan.figure, subject, plan.options, folder, on_part)
        return replace(shown, remarks=(*remarks, *shown.remarks))

    def _run(
        self, experiment: Experiment, path: Path | None, command: Sequence[str]
    ) -> Path:
        """Make a run in ``path``, or else in the folder of its settings."""
        run = experiment.run
        if self.num_workers is not None and run.ray_address is None:
            run = replace(run, num_workers=self.num_workers)
        settings = replace(experiment, run=run)
        place = path or folder_of(settings, self.output)
        with self.watcher.observing() as observer:
            return make_run(settings, place, observer, command).path


def _reason_of(error: Exception, place: Path) -> str:
    """Return the reason of a failure; write the traceback of an unexpected error."""
    # The messages of these errors need no traceback.
    if isinstance(error, KnnPerError | OSError):
        return str(error) or type(error).__name__
    place.parent.mkdir(exist_ok=True)
    write_atomically(place, "".join(traceback.format_exception(error)))
    kind = type(error).__name__
    return f"{kind}: {error}. The traceback is in {place}"


def write_own_report(
    folder: Path, runs: Iterable[Path], remarks: Sequence[str] = ()
) -> tuple[Chart, ...]:
    """Write the page on runs; return its first chart of each data set and partition."""
    # Points of a sweep and rows may share a run.
    paths = list(dict.fromkeys(runs))
    if not paths:
        raise RunError(f"no run of the file has results: {' '.join(remarks)}")
    report = report_of(paths)
    report = replace(report, remarks=(*remarks, *report.remarks))
    write_text(folder / PAGE, as_html(report))
    firsts = [chapter.sections[0] for chapter in report.chapters]
    write_figures(firsts, folder)
    titles = [chapter.over.title for chapter in report.chapters]
    return tuple(
        Chart(
            first.name,
            f"{first.title}{f', {title}' if len(titles) > 1 else ''}. {first.text}",
            first.picture.figure,
        )
        for first, title in zip(firsts, titles, strict=True)
        if first.picture is not None
    )
