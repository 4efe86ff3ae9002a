"""Make files of figures, comparisons, sweeps and experiments into one report."""

import contextlib
import itertools
import shlex
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from knnper import (
    ConfigError,
    DataError,
    Experiment,
    KnnPerError,
    Problem,
    RunError,
    Settings,
)
from knnper.cli.counters import run_counter
from knnper.cli.terminal import say
from knnper.data.catalogue import load_data
from knnper.data.leaf import FemnistHubSettings
from knnper.data.torchvision_sets import DownloadSettings
from knnper.errors import FolderTakenError
from knnper.experiment_file import read_experiment, results_identity
from knnper.files import JsonLines, write_atomically
from knnper.process import known_precision, usable_cores, with_fixed_threads
from knnper.server.observer import Observer, progress_observer
from knnper.server.run_folder import EXPERIMENT, RunFolder, environment
from knnper.settings import Choice, shown
from knnper.simulation.batches.comparison import Comparison, read_comparison
from knnper.simulation.batches.folder import locked_folder
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.progress import Advance, Progress, seconds_left
from knnper.simulation.batches.runner import folder_of, num_steps, run_batch
from knnper.simulation.batches.sweep import Sweep, read_sweep
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
from knnper.simulation.reports.finished_run import RESULT_FILES
from knnper.simulation.reports.pages import (
    as_html,
    render_page,
    template_environment,
    write_text,
)
from knnper.simulation.reports.picture import DescribedChart, as_svg
from knnper.simulation.reports.provenance import environment_text
from knnper.simulation.reports.report import report_of
from knnper.simulation.reports.sections import write_figures
from knnper.simulation.reports.table import Chart, Shown, Table
from knnper.simulation.trained_model import TrainedModel, trained_model
from knnper.simulation.workbench import open_workbench
from knnper.yaml_text import read_yaml
from papers.catalogue import FIGURES, RUN, FigurePlan, make_figure, read_figure
from papers.figures import OnPart

COMMAND = ("python", "-m", "papers", "reproduce")
_LONGEST_TITLE = 140  # in characters: two lines of a page
Plan = Experiment | Sweep | Comparison | FigurePlan
RUNS, REPORT, SECONDS, ERRORS = "runs", "report", "seconds.jsonl", "errors"

# Names in the output folder beside the folders of the files.
RESERVED = (RUNS, f"{REPORT}.html", f"{REPORT}.md", SECONDS, ERRORS)

# Kind -> (keys by which it is recognised, reader).
KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Path], Plan]]] = {
    "figure": (("figure",), read_figure),
    "comparison": (("rows", "extends"), read_comparison),
    "sweep": (("grid", "variants", "random"), read_sweep),
    "experiment": (
        ("data",),
        lambda path: read_experiment(path, experiment_catalogue()),
    ),
}
Marks = frozenset[tuple[str, int]]
DONE, FAILED, MISSING = "done", "failed", "left out: its data are not there"
PAGE = "report.html"
_TEMPLATES = Path(__file__).with_name("templates")

# At this width, letters are as large as in charts of ``knnper report``.
_REM_PER_INCH = 7.1


@dataclass(frozen=True)
class Paragraph:
    """Lines of one paragraph or listing of a comment."""

    text: str
    is_listing: bool


def leading_comment(text: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of the comment at the beginning of a YAML file."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    grouped = itertools.groupby(lines, lambda line: (not line, line.startswith("  ")))
    return tuple(
        Paragraph(("\n" if indented else " ").join(map(str.strip, group)), indented)
        for (blank, indented), group in grouped
        if not blank
    )


def split_title(comment: Sequence[Paragraph]) -> tuple[str, Sequence[Paragraph]]:
    """Return the title of a file (its first sentence) and the following paragraphs."""
    if not comment or comment[0].is_listing:
        return "", comment
    text = comment[0].text
    title = text.rstrip(".:")
    # The full stop of "et al." does not end a sentence.
    if len(title) > _LONGEST_TITLE or ". " in title.replace("et al. ", ""):
        return "", comment
    return title, comment[1:]


@dataclass(frozen=True)
class File:
    """A validated file: path, content, kind and parsed plan."""

    path: Path
    text: str
    name: str
    kind: str
    plan: Plan


def read_files(paths: Sequence[Path]) -> list[File]:
    """Read and validate files in order."""
    files = list[File]()
    problems = list[Problem]()
    for path in paths:
        try:
            files.append(read_file(path))
        except ConfigError as error:
            problems.extend(
                Problem(f"{path}: {problem.place}", problem.message)
                for problem in error.problems
            )
    problems.extend(_name_problems(files))
    if problems:
        raise ConfigError(problems, "the files")
    return files


def read_file(path: Path) -> File:
    """Read a YAML file of any kind."""
    document = read_yaml(path)
    keys = document.keys() if isinstance(document, Mapping) else set()
    kind = next(
        (kind for kind, (key_names, _) in KINDS.items() if keys & set(key_names)), None
    )
    if kind is None:
        kinds = (
            f"{kind_name}: {' or '.join(key_names)}"
            for kind_name, (key_names, _) in KINDS.items()
        )
        known = "; ".join(kinds)
        shown_keys = (
            f"the keys {', '.join(map(str, keys))}" if keys else shown(document)
        )
        message = f"found {shown_keys}, expected a key that tells its kind ({known})"
        raise ConfigError([Problem("document", message)], str(path))
    plan = KINDS[kind][1](path)
    return File(path, path.read_text(encoding="utf-8"), plan.name, kind, plan)


def _name_problems(files: Iterable[File]) -> Iterator[Problem]:
    """Yield a problem for files that would share a folder."""
    # Some file systems ignore the case of names.
    by_name: defaultdict[str, list[File]] = defaultdict(list)
    for file in files:
        by_name[file.name.casefold()].append(file)
        if file.name.casefold() in RESERVED:
            message = f"found {file.name!r}, expected another name: the report needs it"
            yield Problem(f"{file.path}: name", message)
    for same in by_name.values():
        if len(same) > 1:
            paths = ", ".join(str(file.path) for file in same)
            message = f"{paths} share it, expected a name for each; change one"
            yield Problem(f"name {same[0].name}", message)


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


@dataclass(frozen=True)
class Making:
    """Total seconds of a file, and the latest versions and machine."""

    seconds: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """Records of the time taken by the files of an output folder."""

    output: Path

    def begin(self, name: str) -> Marks:
        """Return the state of a file's results before it is made, for `note`."""
        if not _marks(self.output / name):
            records = self._lines.read()
            outdated = [record for record in records if record["name"] == name]
            outdated = [record for record in outdated if record.get("in_folder", True)]
            if outdated:
                self._lines.replace(
                    [record for record in records if record not in outdated]
                )
        return self._marks_of(name)

    def note(self, name: str, seconds: float, before: Marks) -> None:
        """Record the time of a file, unless nothing new was made."""
        if self._marks_of(name) == before:
            return
        record = {
            "name": name,
            "seconds": round(seconds, 3),
            "in_folder": bool(_marks(self.output / name)),
            "environment": environment(),
        }
        self._lines.append(record)

    def making_of(self, name: str) -> Making:
        """Return the recorded time and environment of a file."""
        records = [record for record in self._lines.read() if record["name"] == name]
        seconds = sum(float(record["seconds"]) for record in records)
        return Making(seconds, records[-1]["environment"] if records else environment())

    def _marks_of(self, name: str) -> Marks:
        # The training of a figure has a folder of its own.
        return _marks(self.output / name) | _marks(self.output / RUNS)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.output / SECONDS)


def _marks(folder: Path) -> Marks:
    """Return the results below a folder and their times of modification."""
    return frozenset(
        (str(path), path.stat().st_mtime_ns)
        for name in RESULT_FILES
        for path in folder.rglob(name)
    )


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
            left = seconds_left(began, time.monotonic(), done, total, num_before)
            advance(Progress(done, total, num_before, left))

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
class Made:
    """A file and its result, for the report."""

    file: File
    output: Path
    making: Making
    shown: Shown | None = None
    failure: str | None = None
    missing: str | None = None

    @property
    def title(self) -> str:
        """Title in the file, or else its name."""
        return split_title(leading_comment(self.file.text))[0] or self.file.name

    @property
    def about(self) -> Sequence[Paragraph]:
        """Paragraphs after the title in the file."""
        return split_title(leading_comment(self.file.text))[1]

    @property
    def state(self) -> str:
        """Done, failed or missing data."""
        if self.missing is not None:
            return MISSING
        return DONE if self.failure is None else FAILED

    @property
    def time(self) -> str:
        """Duration in words."""
        return duration(self.making.seconds)

    @property
    def environment(self) -> str:
        """Versions and machine."""
        return environment_text(self.making.environment)

    @property
    def command(self) -> str:
        """Command that makes the file again."""
        return shlex.join([*COMMAND, str(self.file.path)])

    @property
    def warnings(self) -> Iterator[str]:
        """Reason for a failure or omission, and remarks."""
        if self.failure is not None:
            yield f"This file failed. {self.failure}"
        if self.missing is not None:
            yield f"This file was left out. {self.missing}"
        if self.shown is not None:
            yield from self.shown.remarks

    @property
    def own_report(self) -> str:
        """Path of the page on its runs, relative to the report, or empty."""
        path = f"{self.file.name}/{PAGE}"
        return path if self.shown and (self.output / path).is_file() else ""


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
        records = Records(self.output)
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
        return Made(file, self.output, records.making_of(file.name), **result)

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
    return f"{kind}: {error}. Where in the code that was stands in {place}"


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


def duration(seconds: float) -> str:
    """Format a duration, as in ``2 min 05 s``."""
    minutes, seconds_over = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_over:02d} s" if minutes else f"{seconds_over} s"


def write_report(results: Sequence[Made], output: Path) -> Path:
    """Write the report as HTML and Markdown; return the path of the page."""
    page = output / f"{REPORT}.html"
    content = {"entries": results, "summary": summary(results)}
    environment = template_environment(autoescape=True, more=[_TEMPLATES])
    environment.globals["figure"] = _chart
    write_text(page, render_page(environment, "reproduced.html", **content))
    environment = template_environment(autoescape=False, more=[_TEMPLATES])
    text = environment.get_template("reproduced.md").render(**content)
    write_text(output / f"{REPORT}.md", text)
    return page


def summary(results: Sequence[Made]) -> str:
    """Summarise the number of files by state, and the total time."""
    counts = Counter(result.state for result in results)
    parts = [
        f"{counts[state]} {state}" for state in (DONE, FAILED, MISSING) if counts[state]
    ]
    seconds = sum(result.making.seconds for result in results)
    return f"Of {len(results)}: {', '.join(parts)}. {duration(seconds)} in all."


def _chart(result: Made, chart: Chart) -> Markup:
    """Return a chart as an HTML element."""
    alternative = f"{chart.title}. The numbers are in the table."
    picture = DescribedChart(chart.figure, alternative)
    width = round(float(picture.figure.get_figwidth()) * _REM_PER_INCH, 1)
    # Chart and title are escaped by the element.
    drawn = Markup(as_svg(picture, f"{result.file.name}-{chart.name}"))
    return Markup(
        '<figure style="max-width: {}rem">{}<figcaption>{}</figcaption></figure>'
    ).format(width, drawn, chart.title)
