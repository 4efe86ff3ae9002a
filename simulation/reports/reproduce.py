"""Why a file was not played to its end, and where in the code that was."""

import functools
import itertools
import json
import shlex
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from typing import Protocol as Interface

from markupsafe import Markup
from matplotlib.figure import Figure

from knnper.data.catalogue import DATA_SETS
from knnper.data.leaf import FemnistHubSettings
from knnper.data.torchvision_sets import DownloadSettings
from knnper.errors import (
    ConfigError,
    DataError,
    FolderTakenError,
    KnnPerError,
    Problem,
    RunError,
)
from knnper.experiment import Choice, Experiment, Name, Settings
from knnper.files import JsonLines, write_atomically
from knnper.loading import (
    load_experiment,
    parse_settings,
    read_experiment,
    read_yaml,
    results_identity,
    shown,
)
from knnper.process import usable_cores, with_fixed_threads
from knnper.server.observer import Observer
from knnper.server.run_folder import EXPERIMENT, RunFolder, environment
from knnper.simulation.batches.folder import (
    inputs_of,
    keep_inputs,
    led,
    older_code,
    require_inputs,
    sign,
)
from knnper.simulation.batches.plan import (
    Comparison,
    Sweep,
    read_comparison,
    read_sweep,
    shared_sections,
)
from knnper.simulation.batches.progress import Advance
from knnper.simulation.batches.runner import folder_of
from knnper.simulation.batches.tables import (
    compare,
    estimated,
    num_runs,
    num_steps,
    run_sweep,
    table_of,
    write_comparison,
    write_sweep,
)
from knnper.simulation.reports.charts import Picture, as_svg
from knnper.simulation.reports.figure import OnPart
from knnper.simulation.reports.figure_catalogue import (
    OF_EXPERIMENTS,
    OF_NOTHING,
    OF_RUNS,
    OPTIONS,
)
from knnper.simulation.reports.report import (
    as_html,
    render_page,
    report_of,
    template_environment,
    write_figures,
    write_text,
)
from knnper.simulation.reports.runs import (
    RESULT_FILES,
    as_cells,
    environment_text,
    load_run,
    table_of_run,
)
from knnper.simulation.reports.tables import Chart, Shown, Table
from knnper.simulation.run import simulate
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import (
    experiment_catalogue,
    open_workbench,
    require_central,
)

FigureName = Literal[
    "memory", "quality", "drift", "protonn", "fedbasis-collapse", "three-approaches"
]


@dataclass(frozen=True)
class FigureFileSettings(Settings):
    """A figure of the papers.

    Attributes
    ----------
    name
        Names its folder.
    figure
        What ``knnper figure`` calls it.
    experiment
        The path of an experiment's file, from the folder of this one.
    base
        In place of ``experiment`` the sections of one.
    set
        Settings of the experiment by dotted key, on top of these.
    options
        Those of the figure's command, with underscores in their names.
    """

    name: Name
    figure: FigureName
    experiment: str | None = None
    base: dict[str, Any] | None = None
    set: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FigurePlan:
    """A figure, validated.

    Attributes
    ----------
    name, figure
        See `FigureFileSettings`.
    options
        Of the type that `knnper.simulation.reports.figure_catalogue.OPTIONS` has for
        it.
    experiment
        What it needs; None where it needs none.
    """

    name: str
    figure: FigureName
    options: Settings
    experiment: Experiment | None


def read_figure(path: Path) -> FigurePlan:
    """Return the figure that the YAML file at ``path`` describes.

    Raises
    ------
    ConfigError
        With all that is wrong with it, or with its experiment.
    """
    problems = list[Problem]()
    settings = parse_settings(FigureFileSettings, read_yaml(path), "", problems)
    if settings is None:
        raise ConfigError(problems, str(path))
    options_type = OPTIONS[settings.figure]
    options = parse_settings(options_type, settings.options, "options", problems)
    problems.extend(_problems_of(settings))
    experiment = None if problems else _experiment(settings, path, problems)
    if options is None or problems:
        raise ConfigError(problems, str(path))
    return FigurePlan(settings.name, settings.figure, options, experiment)


def _problems_of(settings: FigureFileSettings) -> Iterable[Problem]:
    given = [name for name in ("experiment", "base") if getattr(settings, name)]
    if settings.figure in OF_NOTHING:
        for name in [*given, *(["set"] if settings.set else [])]:
            message = f"found one, expected none: {settings.figure} trains its own"
            yield Problem(name, message)
    elif len(given) != 1:
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")


def _experiment(
    settings: FigureFileSettings, path: Path, problems: list[Problem]
) -> Experiment | None:
    if settings.figure in OF_NOTHING:
        return None
    try:
        shared = shared_sections(settings.base, settings.experiment, path)
        document = {"name": settings.name, **shared}
        changes = [f"{key}={json.dumps(value)}" for key, value in settings.set.items()]
        return load_experiment(document, experiment_catalogue(), changes, str(path))
    except ConfigError as error:
        problems.extend(error.problems)
        return None


_LISTING_INDENT = "  "

_LONGEST_TITLE = 140
"""In characters: two lines of a page."""


@dataclass(frozen=True)
class Paragraph:
    """Some lines of a comment that belong together.

    Attributes
    ----------
    text
        Without the signs of the comment; the lines of a listing stay lines.
    is_listing
        Whether it is to be shown as it is: its lines are indented.
    """

    text: str
    is_listing: bool


def leading_comment(text: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of the comment with which a YAML file begins."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    grouped = itertools.groupby(lines, lambda line: (not line, _is_indented(line)))
    return tuple(
        _paragraph(list(group), is_listing=is_listing)
        for (is_blank, is_listing), group in grouped
        if not is_blank
    )


def split_title(comment: Sequence[Paragraph]) -> tuple[str, Sequence[Paragraph]]:
    """Return the sentence that says what a file is, and the paragraphs after it.

    A first paragraph of one short sentence is one; without it the title is empty.
    """
    if not comment or comment[0].is_listing:
        return "", comment
    text = comment[0].text
    title = text.rstrip(".:")
    if len(title) > _LONGEST_TITLE or ". " in title:
        return "", comment
    return title, comment[1:]


def _is_indented(line: str) -> bool:
    return line.startswith(_LISTING_INDENT)


def _paragraph(lines: list[str], *, is_listing: bool) -> Paragraph:
    parts: Iterator[str] = (line.strip() for line in lines)
    return Paragraph(("\n" if is_listing else " ").join(parts), is_listing)


PAGE = "report.html"


def write_own_report(
    folder: Path, runs: Iterable[Path], remarks: Sequence[str] = ()
) -> tuple[Chart, ...]:
    """Write the page on runs; return its first chart, one a data set and partition.

    It is written beside the page, as SVG and PDF.

    Parameters
    ----------
    folder
        Where to. Runs that the file no longer asks for may be there too.
    runs
        The folders of those that it asks for, and that have results.
    remarks
        What else to tell of them.

    Raises
    ------
    RunError
        If there is no run, or one is not done or damaged.
    """
    # What two points of a sweep or two rows have in common is one run.
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
            functools.partial(_figure, first.picture),
        )
        for first, title in zip(firsts, titles, strict=True)
        if first.picture is not None
    )


def _figure(picture: Picture) -> Figure:
    return picture.figure


Plan = Experiment | Sweep | Comparison | FigurePlan

RUNS = "runs"

REPORT = "report"

SECONDS = "seconds.jsonl"

ERRORS = "errors"

RESERVED = (RUNS, f"{REPORT}.html", f"{REPORT}.md", SECONDS, ERRORS)
"""Names of what stands in the output folder beside the files' own folders."""


@dataclass(frozen=True)
class Protocol:
    """One file, validated.

    Attributes
    ----------
    path
        The file.
    text
        Its content.
    name
        Of its folder.
    kind
        What it is, in one word.
    plan
        What it says.
    """

    path: Path
    text: str
    name: str
    kind: str
    plan: Plan

    @property
    def about(self) -> tuple[Paragraph, ...]:
        """What the file says about itself at its top."""
        return leading_comment(self.text)


def _read_experiment(path: Path) -> Experiment:
    return read_experiment(path, experiment_catalogue())


@dataclass(frozen=True)
class _Kind:
    """What a file can be, told by any of its keys."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Path], Plan]


_KINDS = (
    _Kind("figure", ("figure",), read_figure),
    _Kind("comparison", ("rows",), read_comparison),
    _Kind("sweep", ("vary", "variants", "random"), read_sweep),
    _Kind("experiment", ("data",), _read_experiment),
)


def read_protocols(paths: Sequence[Path]) -> list[Protocol]:
    """Return what the files say, in their order.

    Raises
    ------
    ConfigError
        With all that is wrong with any of them, and if two have the same name.
    """
    found, problems = list[Protocol](), list[Problem]()
    for path in paths:
        try:
            found.append(read_protocol(path))
        except ConfigError as error:
            problems.extend(
                Problem(f"{path}: {one.place}", one.message) for one in error.problems
            )
    problems.extend(_name_problems(found))
    if problems:
        raise ConfigError(problems, "the files")
    return found


def read_protocol(path: Path) -> Protocol:
    """Return what the YAML file at ``path`` says, whatever its kind.

    Raises
    ------
    ConfigError
        If it is of no kind, or with all that is wrong with it.
    """
    document = read_yaml(path)
    kind = _kind_of(document, path)
    plan = kind.read(path)
    text = path.read_text(encoding="utf-8")
    return Protocol(path, text, _name_of(plan), kind.name, plan)


def _name_of(plan: Plan) -> str:
    return plan.settings.name if isinstance(plan, Sweep) else plan.name


def _kind_of(document: object, path: Path) -> _Kind:
    keys = document.keys() if isinstance(document, Mapping) else set()
    for kind in _KINDS:
        if keys & set(kind.keys):
            return kind
    known = "; ".join(f"{one.name}: {' or '.join(one.keys)}" for one in _KINDS)
    found = f"the keys {', '.join(map(str, keys))}" if keys else shown(document)
    message = f"found {found}, expected a key that tells its kind ({known})"
    raise ConfigError([Problem("document", message)], str(path))


def _name_problems(protocols: Iterable[Protocol]) -> Iterable[Problem]:
    """Yield which files would share a folder."""
    # Some file systems take two names for one that differ in their case alone.
    files: defaultdict[str, list[Protocol]] = defaultdict(list)
    for one in protocols:
        files[one.name.casefold()].append(one)
        if one.name.casefold() in RESERVED:
            message = f"found {one.name!r}, expected another name: the report needs it"
            yield Problem(f"{one.path}: name", message)
    for same in files.values():
        if len(same) > 1:
            paths = ", ".join(str(one.path) for one in same)
            message = f"{paths} share it, expected a name for each; change one"
            yield Problem(f"name {same[0].name}", message)


KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {kind.name: kind.keys for kind in _KINDS}
)
"""From each kind to the keys that tell it."""


_EXPECTED = (KnnPerError, OSError)
"""Their messages say all that there is to say."""


def reason_of(error: Exception, name: str, output: Path) -> str:
    """Return why a file failed; keep the traceback of what nobody expected.

    Parameters
    ----------
    error
        What ended it.
    name
        The file's.
    output
        Holds the files' folders.
    """
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    place = _place(name, output)
    place.parent.mkdir(exist_ok=True)
    write_atomically(place, "".join(traceback.format_exception(error)))
    kind = type(error).__name__
    return f"{kind}: {error}. Where in the code that was stands in {place}"


def forget(name: str, output: Path) -> None:
    """Remove the traceback of an earlier time."""
    _place(name, output).unlink(missing_ok=True)


def _place(name: str, output: Path) -> Path:
    # A folder of its own with a traceback in it would be taken for something else.
    return output / ERRORS / f"{name}.txt"


class MissingDataError(DataError):
    """The data of a file are not on this machine."""


def require_data(plan: Plan) -> None:
    """Do nothing if all data that a plan needs can be loaded.

    Raises
    ------
    MissingDataError
        If they are not where the plan says; with the data set's own words.
    DataError
        If they are there and cannot be loaded.
    RunError
        If the data stays with the sites.
    """
    # Settings have no order and need not be hashable; there are few different ones.
    loaded = list[Choice[Settings]]()
    for experiment in _experiments_of(plan):
        require_central(experiment)
        if experiment.data not in loaded:
            loaded.append(experiment.data)
            _load(experiment.data)


def _load(data: Choice[Settings]) -> None:
    try:
        DATA_SETS[data.name].load(data.settings)
    except DataError as error:
        if _is_elsewhere(data.settings):
            raise MissingDataError(str(error)) from error
        raise


def _is_elsewhere(settings: Settings) -> bool:
    """Return whether data that cannot be loaded are not there at all."""
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
        case Sweep():
            yield from plan.experiments
        case Comparison():
            yield from (one.tuning for row in plan.rows for one in row.candidates)
        case FigurePlan(experiment=Experiment() as experiment):
            yield experiment


Marks = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Making:
    """What is known of how a file's results were made.

    Attributes
    ----------
    seconds
        In all, until it was done.
    environment
        Versions and machine of the last time that something was made.
    """

    seconds: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """The record of an output folder.

    Attributes
    ----------
    output
        The folder; it must exist.
    """

    output: Path

    def begin(self, name: str) -> Marks:
        """Return what a file has before it is played, for `note`.

        Where its folder was emptied, the seconds that went into it are forgotten.
        """
        if not _marks(self.output / name):
            records = self._lines.read()
            kept = [
                one for one in records if one["name"] != name or not _is_in_folder(one)
            ]
            if len(kept) < len(records):
                self._lines.replace(kept)
        return self._marks_of(name)

    def note(self, name: str, seconds: float, before: Marks) -> None:
        """Keep how long a file was played, if something was made.

        To look at what is done takes seconds too.
        """
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
        """Return what is known of the file with this name."""
        found = [record for record in self._lines.read() if record["name"] == name]
        seconds = sum(float(record["seconds"]) for record in found)
        return Making(seconds, found[-1]["environment"] if found else environment())

    def _marks_of(self, name: str) -> Marks:
        # The training of a figure is not in its folder.
        return _marks(self.output / name) | _marks(self.output / RUNS)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.output / SECONDS)


def _marks(folder: Path) -> Marks:
    """Return which results are below a folder, and when each was written."""
    return frozenset(
        (str(path), path.stat().st_mtime_ns)
        for name in RESULT_FILES
        for path in folder.rglob(name)
    )


def _is_in_folder(record: Mapping[str, Any]) -> bool:
    """Return whether what was made was left in the file's folder."""
    return bool(record.get("in_folder", True))


COMMAND = ("knnper", "reproduce")


def make_run(
    experiment: Experiment,
    path: Path,
    observer: Observer,
    command: Sequence[str] = COMMAND,
) -> RunFolder:
    """Return the folder of a finished run; made, or gone on with, where it is not.

    Parameters
    ----------
    experiment
        What to run. Where ``auto`` stands for a number of threads, it is that with
        which the run began, here or on another machine.
    path
        The folder.
    observer
        Is told of every step.
    command
        What to type to have it, for the run's manifest.

    Raises
    ------
    FolderTakenError, RunError
        If the folder holds something else, a run of another experiment or one that was
        made from other data, or the run cannot go on.
    DataError
        If the data cannot be loaded.
    """
    inputs = inputs_of(experiment)
    require_inputs(path, inputs)
    folder, settings = _taken_up(path, experiment)
    if folder.is_finished():
        return folder
    keep_inputs(path, inputs)
    sign(path)
    simulate(open_workbench(settings), folder, observer, command)
    return folder


def _taken_up(path: Path, experiment: Experiment) -> tuple[RunFolder, Experiment]:
    """Return the run's folder, and the experiment with the threads it began with."""
    if not (path / EXPERIMENT).is_file():
        settings = with_fixed_threads(experiment)
        return RunFolder.create(path, settings), settings
    folder = RunFolder.open(path)
    found = folder.experiment(experiment_catalogue())
    settings = _with_threads_of(found, experiment)
    if results_identity(found) != results_identity(settings):
        raise FolderTakenError(
            f"{path} holds a run with other settings; delete it to run the file as it "
            "is now, or choose another folder with --output"
        )
    return folder, settings


def _with_threads_of(begun: Experiment, experiment: Experiment) -> Experiment:
    if experiment.run.threads_per_worker != "auto":
        return experiment
    threads = begun.run.threads_per_worker
    return replace(experiment, run=replace(experiment.run, threads_per_worker=threads))


class Watcher(Interface):
    """Is told of every file, and opens what each piece of work reports to."""

    def begins(self, number: int, total: int, protocol: Protocol) -> None:
        """Take that the file with this number, from 1, is played now."""

    def fails(self, protocol: Protocol, reason: str) -> None:
        """Take that a file cannot be played to its end."""

    def counting(self, total: int, noun: str) -> AbstractContextManager[Advance]:
        """Return what counts runs or steps."""

    def observing(self) -> AbstractContextManager[Observer]:
        """Return what follows the rounds of a single run."""

    def drawing(self, parts: str) -> AbstractContextManager[OnPart]:
        """Return what counts the parts of a figure."""


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


_TEMPLATES = Path(__file__).with_name("templates")

_REM_PER_INCH = 7.1
"""At which letters in a chart are as large as in those of ``knnper report``."""

DONE, FAILED, MISSING = "done", "failed", "left out: its data are not there"


@dataclass(frozen=True)
class PlacedChart:
    """A chart at its place in the report.

    Attributes
    ----------
    chart
        What is drawn.
    folder
        Name of the folder of its files.
    """

    chart: Chart
    folder: str

    @property
    def title(self) -> str:
        """What it shows."""
        return self.chart.title

    @property
    def file(self) -> str:
        """Its file, from the folder of the report."""
        return f"{self.folder}/{self.chart.name}.svg"


@dataclass(frozen=True)
class DrawnChart(PlacedChart):
    """A chart inside the page.

    Attributes
    ----------
    picture
        The chart, drawn.
    """

    picture: Picture

    @property
    def width_rem(self) -> float:
        """How wide it is, by the size of the page's letters."""
        return round(float(self.picture.figure.get_figwidth()) * _REM_PER_INCH, 1)


@dataclass(frozen=True)
class Entry:
    """What the report says of a file.

    Attributes
    ----------
    played
        The file.
    output
        The folder of the report.
    """

    played: Played
    output: Path

    @property
    def name(self) -> str:
        """The name that the file gives."""
        return self.played.protocol.name

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return f"file-{self.name}"

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        return self.played.protocol.kind

    @property
    def path(self) -> str:
        """The file."""
        return str(self.played.protocol.path)

    @property
    def text(self) -> str:
        """Its content."""
        return self.played.protocol.text

    @property
    def title(self) -> str:
        """What it shows, as the file says; its name where it does not."""
        return split_title(self.played.protocol.about)[0] or self.name

    @property
    def about(self) -> Sequence[Paragraph]:
        """What the file says of itself after its title."""
        return split_title(self.played.protocol.about)[1]

    @property
    def state(self) -> str:
        """Whether it was played to its end."""
        if self.played.missing is not None:
            return MISSING
        return DONE if self.played.failure is None else FAILED

    @property
    def time(self) -> str:
        """How long it took."""
        return duration(self.played.making.seconds)

    @property
    def environment(self) -> str:
        """With what it was made."""
        return environment_text(self.played.making.environment)

    @property
    def command(self) -> str:
        """What to type to have it again."""
        return shlex.join(["knnper", "reproduce", self.path])

    @property
    def shown(self) -> bool:
        """Whether there is anything to show."""
        return self.played.shown is not None

    @property
    def warnings(self) -> Iterator[str]:
        """Why it failed or was left out, and what is remarked."""
        if self.played.failure is not None:
            yield f"This file failed. {self.played.failure}"
        if self.played.missing is not None:
            yield f"This file was left out. {self.played.missing}"
        if self.played.shown is not None:
            yield from self.played.shown.remarks

    @property
    def charts(self) -> list[DrawnChart]:
        """Its charts, drawn."""
        if self.played.shown is None:
            return []
        return [
            DrawnChart(chart, self.name, Picture(chart.draw(), _alternative(chart)))
            for chart in self.played.shown.charts
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Its tables."""
        return () if self.played.shown is None else self.played.shown.tables

    @property
    def own_report(self) -> str:
        """The page on its runs, from the folder of the report; empty without."""
        path = f"{self.name}/{PAGE}"
        return path if self.shown and (self.output / path).is_file() else ""


def _alternative(chart: Chart) -> str:
    return f"{chart.title}. The numbers are in the table."


def duration(seconds: float) -> str:
    """Return a time in words, as in ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def write_report(played: Sequence[Played], output: Path) -> Path:
    """Write the report as a page and as Markdown; return the page.

    Raises
    ------
    RunError
        If a file cannot be written.
    """
    entries = [Entry(one, output) for one in played]
    page = output / f"{REPORT}.html"
    write_text(page, as_page(entries))
    write_text(output / f"{REPORT}.md", as_markdown(entries))
    return page


def as_page(entries: Sequence[Entry]) -> str:
    """Return the report as an HTML page with its charts and its style inside."""
    environment = template_environment(autoescape=True, more=[_TEMPLATES])
    environment.filters["svg"] = _svg
    return render_page(
        environment, "reproduced.html", entries=entries, summary=summary(entries)
    )


def as_markdown(entries: Sequence[Entry]) -> str:
    """Return the report as Markdown that links the charts' files."""
    environment = template_environment(autoescape=False, more=[_TEMPLATES])
    template = environment.get_template("reproduced.md")
    return template.render(entries=entries, summary=summary(entries))


def summary(entries: Sequence[Entry]) -> str:
    """Return how many files were played, and how long that took."""
    counts = Counter(entry.state for entry in entries)
    states = (state for state in (DONE, FAILED, MISSING) if counts[state])
    told = [f"{counts[state]} {state}" for state in states]
    seconds = sum(entry.played.making.seconds for entry in entries)
    return f"Of {len(entries)}: {', '.join(told)}. {duration(seconds)} in all."


def _svg(chart: DrawnChart) -> Markup:
    # The element escapes what it is made of.
    return Markup(as_svg(chart.picture, f"{chart.folder}-{chart.chart.name}"))
