"""A report: its chapters, its page, its files."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.metrics import ACCURACY
from knnper.simulation.reports.accuracy_table import (
    ModelRow,
    degraded_columns,
    table_of,
    table_of_group,
)
from knnper.simulation.reports.charts import (
    MOST_SHOWN,
    THEMED,
    Colors,
    Picture,
    as_svg,
    draw_averages,
    draw_curves,
    draw_partition,
    draw_reliability,
    draw_scatters,
    draw_store_sizes,
    draw_weights,
    report_style,
)
from knnper.simulation.reports.estimate import WEAK_NOTE
from knnper.simulation.reports.figure import colors_of, settle, write_pictures
from knnper.simulation.reports.finished_run import (
    GROUPS,
    FinishedRun,
    find_runs,
)
from knnper.simulation.reports.provenance import (
    FederatedData,
    by_data,
    environments,
    facts_of,
    repetition_of,
)
from knnper.simulation.reports.setups import (
    Setup,
    comparability,
    departures,
    in_common,
    metrics_of,
    missing_files,
    setups_of,
    split_of,
)
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import markdown_cell, markdown_text
from knnper.simulation.reports.verdict import verdict_of, worst_table

_AVERAGES = (
    "A dot is the mean over the seeds, its line the 95 % interval of the mean, cut at "
    "0 and 100 %, and dotted where it is of two seeds; diamonds are unpersonalised "
    "models."
)
_DEPARTURES = "Settings with more than one value"
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Section:
    """A chart with its heading."""

    name: str
    title: str
    text: str
    picture: Picture | None


@dataclass(frozen=True)
class _Kind:
    """What a section is made of, whatever the runs; ``text`` may name the split."""

    name: str
    title: str
    text: str
    missing: str
    draw: Callable[[Sequence[Setup], Colors], Picture | None]
    is_of_each_setup: bool = True


_KINDS = (
    _Kind(
        "curves",
        "Learning curves",
        "A thin line is a seed, a thick one the mean over the seeds. Setups that train "
        "alike share a line.",
        "The runs have no rounds: nothing was trained, or rounds.jsonl is missing.",
        draw_curves,
    ),
    _Kind(
        "clients",
        "Client by client",
        "Each client's accuracy with the global and with its own model. Above the "
        "diagonal a client gains by its own model, below it loses. Filled circles are "
        "seen clients, hollow squares unseen ones; the area is the number of clients "
        "at that point, all seeds together. Methods whose global model means nothing "
        "by itself have no panel.",
        "No client's model differs from a global one that means anything by itself, or "
        "clients.csv is missing.",
        draw_scatters,
    ),
    _Kind(
        "store-sizes",
        "Size of the memory",
        "Clients in classes of about as many each, by the examples in their memory; a "
        "point is the share of all their {split} examples that are right. Coloured "
        "circles are the clients' own models, grey squares the global one where it "
        "means anything by itself.",
        "No method here keeps a memory.",
        draw_store_sizes,
    ),
    _Kind(
        "weights",
        "Weight of the memory",
        "The λ that each client chose. At 0 a client uses the global model alone, at 1 "
        "its memory alone. Filled bars are seen clients, hollow ones on top of them "
        "unseen clients, all seeds together.",
        "No method here mixes in a memory.",
        draw_weights,
    ),
    _Kind(
        "reliability",
        "Calibration",
        "The clients' {split} examples in 15 bins by the largest probability. On the "
        "diagonal a model is right as often as it says; below it is too sure of "
        "itself. The area of a point is its part of the examples. Grey squares are the "
        "global model, where it means anything by itself. The error is the expected "
        "calibration error, all seeds pooled.",
        "The runs have no bins: personalization.jsonl is missing, or the clients keep "
        "their figures to themselves.",
        draw_reliability,
    ),
    _Kind(
        "partition",
        "Who has what",
        "Above, each client's training and validation examples; below, how many of "
        "each label: the denser, the more, as the scale on the right says. Another "
        "seed gives another split.",
        "No run has partition.json, which a simulation writes when it starts: the data "
        "stays with the sites, or an earlier version made the runs.",
        lambda setups, _: draw_partition(setups),
        is_of_each_setup=False,
    ),
)


def average_of(setup: Setup) -> float:
    """Return the mean over the seeds of the seen clients' average, by which to sort."""
    return fmean(run.average for run in setup.runs)


def draw_sections(
    setups: Sequence[Setup], rows: Sequence[ModelRow], prefix: str = ""
) -> list[Section]:
    """Return all sections; a chart that the runs have no data for is left out."""
    ordered, split = list(setups), split_of(setups)
    is_cut = len(ordered) > MOST_SHOWN
    if is_cut:  # the best first
        ordered.sort(key=lambda setup: -average_of(setup))
    shades = colors_of(setup.title for setup in ordered)
    colors = {one.label: color for one, color in zip(ordered, shades, strict=True)}
    with report_style():
        averages = draw_averages(rows, colors, split)
        text = _AVERAGES if averages else "No client reported any figure."
        sections = [Section(f"{prefix}averages", "Averages", text, averages)]
        for kind in _KINDS:
            picture = kind.draw(ordered, colors)
            text = kind.text.format(split=split) if picture else kind.missing
            if picture and kind.is_of_each_setup and is_cut:
                text += (
                    f" At most {MOST_SHOWN} of the {len(ordered)} setups are drawn: "
                    "those with the largest average over the seen clients."
                )
            if picture and picture.note:
                text += f" {picture.note}"
            sections.append(Section(prefix + kind.name, kind.title, text, picture))
        for section in sections:
            if section.picture is not None:
                settle(section.picture.figure)
    return sections


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; parents are created as needed."""
    # The names of folders may have characters that stand for single bytes, in a C
    # locale for those of UTF-8.
    content = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def write_figures(sections: Iterable[Section], folder: Path) -> list[Path]:
    """Write each chart as NAME.svg and NAME.pdf; return the files."""
    drawn = [(one.name, one.picture.figure) for one in sections if one.picture]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = (write_pictures(folder, *one, ("svg", "pdf")) for one in drawn)
        return [path for paths in written for path in paths]
    except OSError as error:
        raise RunError(f"no figures can be written to {folder}: {error}") from error


@dataclass(frozen=True)
class Chapter:
    """What a report says of the runs over one data set and partition."""

    name: str
    over: FederatedData
    setups: tuple[Setup, ...]
    tables: Mapping[str, tuple[ModelRow, ...]]  # by metric, that of the accuracy first
    remarks: tuple[str, ...]
    facts: Mapping[str, str]  # what stands at the top, by its name
    departures: Table  # in which settings the setups differ, a column each
    common: Mapping[str, str]  # the settings that all have with the same value

    @property
    def split(self) -> str:
        """Which split the clients were tested on."""
        return split_of(self.setups)

    @property
    def rows(self) -> tuple[ModelRow, ...]:
        """Those of the accuracy."""
        return self.tables[ACCURACY]

    @property
    def shown(self) -> Iterator[tuple[Table, list[bool]]]:
        """A table for each metric and group, with which of its rows are references."""
        for rows in self.tables.values():
            for group in GROUPS:
                if found := [row for row in rows if row.group == group]:
                    table = table_of_group(found, degraded_columns(rows))
                    yield table, [row.is_reference for row in found]

    @functools.cached_property
    def verdict(self) -> tuple[str, ...]:
        """Sentences on the best setup, the most important one first."""
        return tuple(verdict_of(self.setups, self.rows))

    @functools.cached_property
    def worst(self) -> tuple[Table, ...]:
        """Whom each setup serves worst, best setups first, `MOST_SHOWN` at most."""
        ordered = sorted(self.setups, key=average_of, reverse=True)
        tables = map(worst_table, ordered[:MOST_SHOWN])
        return tuple(table for table in tables if table is not None)

    @property
    def is_weak(self) -> bool:
        """Whether an interval in the tables is of two seeds."""
        rows = itertools.chain(*self.tables.values())
        return any(figure.mark for row in rows for figure in row.figures.values())

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """The charts; the runs' other files are read, and may be damaged."""
        prefix = f"{self.name}-" if self.name else ""
        return tuple(draw_sections(self.setups, self.rows, prefix))

    @property
    def remarks_on_charts(self) -> tuple[str, ...]:
        """Sentences on files that charts lack."""
        return tuple(missing_files(self.setups))


@dataclass(frozen=True)
class Report:
    """A whole report."""

    chapters: tuple[Chapter, ...]
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """The names of the experiments."""
        names = (str(run.experiment.get("name", run.name)) for run in self._runs)
        return ", ".join(dict.fromkeys(names))

    @property
    def setups(self) -> list[Setup]:
        """Those of all chapters."""
        return [setup for one in self.chapters for setup in one.setups]

    @property
    def sections(self) -> list[Section]:
        """Those of all chapters."""
        return [section for one in self.chapters for section in one.sections]

    @property
    def repetitions(self) -> list[Mapping[str, Any]]:
        """How the runs were made."""
        several = len(self.chapters) > 1
        labelled = [
            (setup, setup.label + (f", {one.over.title}" if several else ""))
            for one in self.chapters
            for setup in one.setups
        ]
        return [
            repetition_of(*one, number) for number, one in enumerate(labelled, start=1)
        ]

    @property
    def environments(self) -> list[str]:
        """With what they were made."""
        return environments(self._runs)

    @property
    def _runs(self) -> list[FinishedRun]:
        return [run for setup in self.setups for run in setup.runs]


def report_of(paths: Sequence[Path], labels: Sequence[str] = ()) -> Report:
    """Return the report on the runs in ``paths``, see `find_runs`."""
    runs_found, remarks = find_runs(paths, labels)
    groups = by_data(runs_found)
    several = len(groups) > 1
    chapters = list[Chapter]()
    for place, (over, runs) in enumerate(groups, start=1):
        setups, name = tuple(setups_of(runs)), f"part-{place}" if several else ""
        firsts = [setup.runs[0] for setup in setups]
        keys, cells = departures(firsts)
        labelled = ((it.label, *one) for it, one in zip(setups, cells, strict=True))
        chapters.append(
            Chapter(
                name,
                over,
                setups,
                {one: tuple(table_of(setups, one)) for one in metrics_of(setups)},
                tuple(comparability(setups)),
                facts_of(over, setups),
                Table(_DEPARTURES, ("setup", *keys), tuple(labelled)),
                in_common(firsts),
            )
        )
    if several:
        remarks.append(
            f"The runs are over {len(groups)} data sets or partitions. Figures over "
            "one do not compare with those over another: each has a table of its own."
        )
    return Report(tuple(chapters), tuple(remarks))


def template_environment(*, autoescape: bool, more: Sequence[Path] = ()) -> Environment:
    """Return where templates are found: the reports' own and those in other folders."""
    environment = Environment(
        autoescape=autoescape,
        loader=FileSystemLoader([_TEMPLATES, *more]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = markdown_cell
    environment.filters["text"] = markdown_text
    environment.globals["degraded"] = degraded_columns
    environment.globals["weak_note"] = WEAK_NOTE
    return environment


def render_page(environment: Environment, name: str, **content: object) -> str:
    """Return the page of a template that extends ``page.html``, its style inside."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(name).render(
        **content, style=Markup(style), themed=THEMED
    )


def as_html(report: Report) -> str:
    """Return the report as an HTML page with its charts and its style inside."""
    environment = template_environment(autoescape=True)
    environment.filters["chart"] = _chart
    content = {"report": report, "most_open": MOST_SHOWN}
    return render_page(environment, "report.html", **content)


def as_notebook_html(run: Path) -> str:
    """Return the verdict on one run and its tables as a part of a page."""
    (chapter,) = report_of([run]).chapters
    template = template_environment(autoescape=True).get_template("notebook.html")
    return template.render(chapter=chapter)


def as_markdown_report(report: Report, figures: Path | None = None) -> str:
    """Return the report as Markdown; charts are told by their alternative texts."""
    template = template_environment(autoescape=False).get_template("report.md")
    return template.render(report=report, figures=figures)


def _chart(section: Section) -> Markup:
    if section.picture is None:
        return Markup("")
    # The element escapes what it is made of.
    return Markup(as_svg(section.picture, section.name))
