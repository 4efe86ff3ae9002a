"""All that a report says, before it is a page, a text or files."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulation.reporting.comparability import comparability, missing_files
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
    """What the runs found, as a table.

    Attributes
    ----------
    setups
        The runs, those that differ in the seed alone together.
    rows
        The table.
    remarks
        Sentences on what is left out, and on what makes setups hard to compare.
    """

    setups: tuple[Setup, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes
    ----------
    title
        Names the experiments.
    split
        Which split the clients were tested on, see `split_of`.
    findings
        The table.
    sections
        The charts.
    departures, common
        In which settings setups differ, and which all have with the same value.
    repetitions, environments
        How the runs were made, and with what.
    """

    title: str
    split: str
    findings: Findings
    sections: tuple[Section, ...]
    departures: Departures
    common: Mapping[str, str]
    repetitions: tuple[Repetition, ...]
    environments: tuple[str, ...]


def findings_of(paths: Sequence[Path]) -> Findings:
    """Return the table of the runs in ``paths``, see `find_runs`.

    Raises
    ------
    RunError
        If there is no run that is done in one of them.
    """
    found = find_runs(paths)
    setups = setups_of(found.runs)
    remarks = (*found.remarks, *comparability(setups))
    return Findings(tuple(setups), tuple(table_of(setups)), remarks)


def report_of(findings: Findings) -> Report:
    """Return the report; the runs' other files are read for the charts.

    Raises
    ------
    RunError
        If one of them is damaged.
    """
    setups = findings.setups
    firsts = [setup.runs[0] for setup in setups]
    runs = [run for setup in setups for run in setup.runs]
    names = dict.fromkeys(str(run.experiment.get("name", run.name)) for run in runs)
    remarks = (*findings.remarks, *missing_files(setups))
    return Report(
        title=", ".join(names),
        split=split_of(setups),
        findings=replace(findings, remarks=remarks),
        sections=tuple(draw_sections(setups, findings.rows)),
        departures=departures(firsts),
        common=in_common(firsts),
        repetitions=tuple(map(repetition_of, setups, itertools.count(1))),
        environments=tuple(environments(runs)),
    )
