"""All that a report says, before it is a page, a text or files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulation.reporting.comparability import comparability, missing_files
from simulation.reporting.federated_data import FederatedData, by_data, facts_of
from simulation.reporting.provenance import (
    Repetition,
    environments,
    repetition_of,
)
from simulation.reporting.runs import find_runs
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
class Findings:
    """What the runs over one data set and partition found, as a table.

    Attributes
    ----------
    over
        The data set and the partition.
    facts
        What else they have in common, as words by name: see `facts_of`.
    setups
        The runs, those that differ in the seed alone together.
    rows
        The table.
    remarks
        Sentences on what makes setups hard to compare.
    """

    over: FederatedData
    facts: Mapping[str, str]
    setups: tuple[Setup, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class AllFindings:
    """What runs found, each data set and partition by itself.

    Attributes
    ----------
    parts
        One for each.
    remarks
        Sentences on all of it, as on what is left out.
    """

    parts: tuple[Findings, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Chapter:
    """What a report says of one data set and partition.

    Attributes
    ----------
    name
        Its place in the page; empty for the only one.
    findings
        The table.
    split
        Which split the clients were tested on, see `split_of`.
    sections
        The charts.
    departures, common
        In which settings setups differ, and which all have with the same value.
    """

    name: str
    findings: Findings
    split: str
    sections: tuple[Section, ...]
    departures: Departures
    common: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes
    ----------
    title
        Names the experiments.
    remarks
        Sentences on all of it.
    chapters
        One a data set and partition.
    repetitions, environments
        How the runs were made, and with what.
    """

    title: str
    remarks: tuple[str, ...]
    chapters: tuple[Chapter, ...]
    repetitions: tuple[Repetition, ...]
    environments: tuple[str, ...]

    @property
    def setups(self) -> list[Setup]:
        """Those of all chapters."""
        return [setup for one in self.chapters for setup in one.findings.setups]

    @property
    def sections(self) -> list[Section]:
        """Those of all chapters."""
        return [section for one in self.chapters for section in one.sections]


def findings_of(paths: Sequence[Path]) -> AllFindings:
    """Return the tables of the runs in ``paths``, see `find_runs`.

    Raises
    ------
    RunError
        If there is no run that is done in one of them, or one is damaged.
    """
    found = find_runs(paths)
    parts = []
    for over, runs in by_data(found.runs):
        setups = tuple(setups_of(runs))
        rows, remarks = tuple(table_of(setups)), tuple(comparability(setups))
        parts.append(Findings(over, facts_of(over, setups), setups, rows, remarks))
    apart = (
        [
            f"The runs are over {len(parts)} data sets or partitions. Figures over one "
            "do not compare with those over another: each has a table of its own."
        ]
        if len(parts) > 1
        else []
    )
    return AllFindings(tuple(parts), (*found.remarks, *apart))


def report_of(findings: AllFindings) -> Report:
    """Return the report; the runs' other files are read for the charts.

    Raises
    ------
    RunError
        If one of them is damaged.
    """
    several = len(findings.parts) > 1
    chapters = tuple(
        _chapter(part, f"part-{number}" if several else "")
        for number, part in enumerate(findings.parts, start=1)
    )
    setups = [
        (setup, f"{setup.label}, {part.over.title}" if several else setup.label)
        for part in findings.parts
        for setup in part.setups
    ]
    runs = [run for setup, _ in setups for run in setup.runs]
    names = dict.fromkeys(str(run.experiment.get("name", run.name)) for run in runs)
    return Report(
        title=", ".join(names),
        remarks=findings.remarks,
        chapters=chapters,
        repetitions=tuple(
            repetition_of(setup, label, number)
            for number, (setup, label) in enumerate(setups, start=1)
        ),
        environments=tuple(environments(runs)),
    )


def _chapter(part: Findings, name: str) -> Chapter:
    firsts = [setup.runs[0] for setup in part.setups]
    remarks = (*part.remarks, *missing_files(part.setups))
    prefix = f"{name}-" if name else ""
    return Chapter(
        name=name,
        findings=replace(part, remarks=remarks),
        split=split_of(part.setups),
        sections=tuple(draw_sections(part.setups, part.rows, prefix)),
        departures=departures(firsts),
        common=in_common(firsts),
    )
