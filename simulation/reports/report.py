"""A report: chapters on runs over one data set each."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.metrics import ACCURACY
from knnper.simulation.audit.audit import FILE, read_audit
from knnper.simulation.reports.accuracy_table import (
    ModelRow,
    degraded_columns,
    table_of,
    table_of_group,
)
from knnper.simulation.reports.audit_section import audit_table
from knnper.simulation.reports.finished_run import GROUPS, FinishedRun, find_runs
from knnper.simulation.reports.picture import MOST_SHOWN
from knnper.simulation.reports.provenance import (
    FederatedData,
    by_data,
    environments,
    facts_of,
    repetition_of,
)
from knnper.simulation.reports.sections import Section, average_of, draw_sections
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
from knnper.simulation.reports.verdict import verdict_of, worst_table

_DEPARTURES = "Settings with more than one value"


@dataclass(frozen=True)
class Chapter:
    """The part of a report on the runs over one data set and partition.

    Attributes
    ----------
    tables
        The rows by metric, the accuracy first.
    facts
        The facts at the top, by name.
    departures
        The settings in which the setups differ, a column each.
    common
        The settings that have the same value in all setups.
    """

    name: str
    over: FederatedData
    setups: tuple[Setup, ...]
    tables: Mapping[str, tuple[ModelRow, ...]]
    remarks: tuple[str, ...]
    facts: Mapping[str, str]
    departures: Table
    common: Mapping[str, str]

    @property
    def split(self) -> str:
        """The split that the clients were evaluated on."""
        return split_of(self.setups)

    @property
    def rows(self) -> tuple[ModelRow, ...]:
        """The rows of the accuracy."""
        return self.tables[ACCURACY]

    @property
    def shown(self) -> Iterator[tuple[Table, list[bool]]]:
        """Each metric's and group's table, with a flag for rows of references."""
        for rows in self.tables.values():
            for group in GROUPS:
                if of_group := [row for row in rows if row.group == group]:
                    table = table_of_group(of_group, degraded_columns(rows))
                    yield table, [row.is_reference for row in of_group]

    @functools.cached_property
    def verdict(self) -> tuple[str, ...]:
        """Sentences on the best setup, the most important one first."""
        return tuple(verdict_of(self.setups, self.rows))

    @functools.cached_property
    def worst(self) -> tuple[Table, ...]:
        """The clients that each of the best `MOST_SHOWN` setups serves worst."""
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
        """The charts. Raises RunError if a file that they need is damaged."""
        prefix = f"{self.name}-" if self.name else ""
        return tuple(draw_sections(self.setups, self.rows, prefix))

    @property
    def remarks_on_charts(self) -> tuple[str, ...]:
        """Sentences on missing files that charts need."""
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
        """The setups of all chapters."""
        return [setup for chapter in self.chapters for setup in chapter.setups]

    @property
    def sections(self) -> list[Section]:
        """The charts of all chapters."""
        return [section for chapter in self.chapters for section in chapter.sections]

    @property
    def repetitions(self) -> list[Mapping[str, Any]]:
        """How to repeat each setup."""
        several = len(self.chapters) > 1
        labelled = [
            (setup, setup.label + (f", {chapter.over.title}" if several else ""))
            for chapter in self.chapters
            for setup in chapter.setups
        ]
        return [
            repetition_of(setup, label, number)
            for number, (setup, label) in enumerate(labelled, start=1)
        ]

    @property
    def environments(self) -> list[str]:
        """The versions and machines of the runs."""
        return environments(self._runs)

    @property
    def audits(self) -> list[Table]:
        """A table for each run with a record of `knnper audit` in its folder."""
        records = ((run, read_audit(run.path / FILE)) for run in self._runs)
        return [
            audit_table(record, f"Audit of {run.name}, {record.date[:10]}")
            for run, record in records
            if record is not None
        ]

    @property
    def _runs(self) -> list[FinishedRun]:
        return [run for setup in self.setups for run in setup.runs]


def report_of(paths: Sequence[Path], labels: Sequence[str] = ()) -> Report:
    """Return the report on the runs in ``paths``, see `find_runs`."""
    all_runs, remarks = find_runs(paths, labels)
    groups = by_data(all_runs)
    several = len(groups) > 1
    chapters = list[Chapter]()
    for place, (over, runs) in enumerate(groups, start=1):
        setups = tuple(setups_of(runs))
        firsts = [setup.runs[0] for setup in setups]
        keys, cells = departures(firsts)
        rows = [
            (setup.label, *values) for setup, values in zip(setups, cells, strict=True)
        ]
        chapters.append(
            Chapter(
                name=f"part-{place}" if several else "",
                over=over,
                setups=setups,
                tables={
                    metric: tuple(table_of(setups, metric))
                    for metric in metrics_of(setups)
                },
                remarks=tuple(comparability(setups)),
                facts=facts_of(over, setups),
                departures=Table(_DEPARTURES, ("setup", *keys), tuple(rows)),
                common=in_common(firsts),
            )
        )
    if several:
        remarks.append(
            f"The runs are over {len(groups)} data sets or partitions. Figures over "
            "one do not compare with those over another: each has its own table."
        )
    return Report(tuple(chapters), tuple(remarks))
