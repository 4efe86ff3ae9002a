"""All that a report says, before it is a page, a text or files."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulation.reporting.comparability import comparability, missing_files
from simulation.reporting.federated_data import FederatedData, by_data, facts_of
from simulation.reporting.provenance import Repetition, environments, repetition_of
from simulation.reporting.runs import Run, find_runs
from simulation.reporting.sections import Section, draw_sections
from simulation.reporting.setups import (
    Departures,
    Setup,
    departures,
    in_common,
    setups_of,
    split_of,
)
from simulation.reporting.table import Row, table_of


@dataclass(frozen=True)
class Chapter:
    """What a report says of the runs over one data set and partition.

    Attributes
    ----------
    name
        Its place in the page; empty for the only one.
    over
        The data set and the partition.
    setups
        The runs, those that differ in the seed alone together.
    rows
        The table.
    remarks
        Sentences on what makes the setups hard to compare.
    """

    name: str
    over: FederatedData
    setups: tuple[Setup, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        """What stands at the top, by its name."""
        return facts_of(self.over, self.setups)

    @property
    def split(self) -> str:
        """Which split the clients were tested on."""
        return split_of(self.setups)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """The charts; the runs' other files are read, and may be damaged."""
        prefix = f"{self.name}-" if self.name else ""
        return tuple(draw_sections(self.setups, self.rows, prefix))

    @property
    def remarks_on_charts(self) -> tuple[str, ...]:
        """Sentences on files that charts lack."""
        return tuple(missing_files(self.setups))

    @property
    def departures(self) -> Departures:
        """In which settings the setups differ."""
        return departures([setup.runs[0] for setup in self.setups])

    @property
    def common(self) -> Mapping[str, str]:
        """Which settings all have with the same value."""
        return in_common([setup.runs[0] for setup in self.setups])


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes
    ----------
    chapters
        One a data set and partition.
    remarks
        Sentences on all of it, as on what is left out.
    """

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
    def repetitions(self) -> list[Repetition]:
        """How the runs were made."""
        several = len(self.chapters) > 1
        labels = [
            f"{setup.label}, {one.over.title}" if several else setup.label
            for one in self.chapters
            for setup in one.setups
        ]
        return [
            repetition_of(setup, label, number)
            for number, (setup, label) in enumerate(
                zip(self.setups, labels, strict=True), start=1
            )
        ]

    @property
    def environments(self) -> list[str]:
        """With what they were made."""
        return environments(self._runs)

    @property
    def _runs(self) -> list[Run]:
        return [run for setup in self.setups for run in setup.runs]


def report_of(paths: Sequence[Path]) -> Report:
    """Return the report on the runs in ``paths``, see `find_runs`.

    Raises
    ------
    RunError
        If there is no run that is done in one of them, or one is damaged.
    """
    found = find_runs(paths)
    groups = by_data(found.runs)
    several = len(groups) > 1
    chapters, remarks = list[Chapter](), list(found.remarks)
    for number, (over, runs) in enumerate(groups, start=1):
        setups, name = tuple(setups_of(runs)), f"part-{number}" if several else ""
        rows, told = tuple(table_of(setups)), tuple(comparability(setups))
        chapters.append(Chapter(name, over, setups, rows, told))
    if several:
        remarks.append(
            f"The runs are over {len(groups)} data sets or partitions. Figures over "
            "one do not compare with those over another: each has a table of its own."
        )
    return Report(tuple(chapters), tuple(remarks))
