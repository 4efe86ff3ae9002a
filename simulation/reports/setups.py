"""Setups: runs that differ in the seed alone, and the settings that tell them apart."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from knnper.simulation.origin import CODE, fingerprint_in
from knnper.simulation.reports.finished_run import (
    GROUPS,
    VALIDATION,
    FinishedRun,
)
from knnper.simulation.reports.text import as_text

MOST_IN_LABEL = 3  # departures in a label; with more of them it has the run's name
ABSENT = "-"


@dataclass(frozen=True)
class Setup:
    """Runs that differ in the seed alone: one row of a table, one line of a chart."""

    title: str
    label: str  # its name in tables and charts, in no two setups the same
    runs: tuple[FinishedRun, ...]

    @property
    def has_reference(self) -> bool:
        """Whether its unpersonalised model means anything."""
        return self.runs[0].reference_title is not None


def setups_of(runs: Iterable[FinishedRun]) -> list[Setup]:
    """Return the setups of ``runs``, in the order of each one's first run."""
    # A second run with the same seed is no further evidence: it makes another setup.
    kinds: dict[tuple[str, str, int], list[FinishedRun]] = {}
    times: Counter[tuple[str, str, int | None]] = Counter()
    for run in runs:
        again = times[run.label, run.kind, run.seed]
        kinds.setdefault((run.label, run.kind, again), []).append(run)
        times[run.label, run.kind, run.seed] += 1
    for found in kinds.values():
        found.sort(key=lambda run: run.seed or 0)
    groups, labels = list(kinds.values()), dict[int, str]()
    names = [found[0].label or found[0].title for found in groups]
    for name in set(names):
        same = [place for place, other in enumerate(names) if other == name]
        told = _told_apart([groups[place][0] for place in same])
        labels.update(zip(same, (name + suffix for suffix in told), strict=True))
    return [
        Setup(found[0].title, labels[place], tuple(found))
        for place, found in enumerate(groups)
    ]


def split_of(setups: Sequence[Setup]) -> str:
    """Return which split the clients of setups over the same data were tested on."""
    return setups[0].runs[0].evaluated_on


def departures(firsts: Sequence[FinishedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the settings in which runs, one of each setup, differ; and their cells."""
    settings = [run.settings for run in firsts]
    keys = [
        key
        for key in dict.fromkeys(key for one in settings for key in one)
        if len({as_text(one[key]) for one in settings if key in one}) > 1
    ]
    return keys, [
        [as_text(one[key]) if key in one else ABSENT for key in keys]
        for one in settings
    ]


def in_common(firsts: Sequence[FinishedRun]) -> dict[str, str]:
    """Return the settings that all runs have with the same value, as text."""
    first, *others = [run.settings for run in firsts]
    return {
        key: as_text(value)
        for key, value in first.items()
        if all(key in one and one[key] == value for one in others)
    }


def _told_apart(firsts: Sequence[FinishedRun]) -> list[str]:
    """Return what tells each of some runs of one title from the others."""
    if len(firsts) == 1:
        return [""]
    keys, cells = departures(firsts)
    ends = [key.rpartition(".")[2] for key in keys]
    short = [
        key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)
    ]
    named = [zip(short, one, strict=True) for one in cells]
    by_keys = [
        "".join(f", {key} {cell}" for key, cell in one if cell != ABSENT)
        for one in named
    ]
    by_names = [f" ({run.name})" for run in firsts]
    for suffixes in (by_keys if 0 < len(keys) <= MOST_IN_LABEL else [], by_names):
        if len(set(suffixes)) == len(firsts):
            return suffixes
    return [f" ({run.path})" for run in firsts]


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what makes the setups hard to compare."""
    runs = [run for setup in setups for run in setup.runs]
    # A split makes a table of its own: here all are, or none.
    if any(run.evaluated_on == VALIDATION for run in runs):
        yield (
            "These runs were evaluated on validation data (partition.evaluate_on: "
            "validation): they choose settings, and are no results on test data."
        )
    if len({tuple(run.seed for run in setup.runs) for setup in setups}) > 1:
        yield "Not all setups have the same seeds: their means are over other splits."
    seeds = {run.seed for run in runs}
    if len({(run.seed, run.split_hash) for run in runs}) > len(seeds):
        yield (
            "Runs with the same seed have different splits of the data: compare their "
            "averages with care, and their clients not at all."
        )
    fingerprints = (fingerprint_in(run.path) for run in runs)
    versions = list(filter(None, fingerprints))
    if len(set(versions)) > 1:
        yield (
            f"The runs were not made by the same code: {CODE} has {len(set(versions))} "
            f"versions in {len(versions)} runs. That may be why figures differ."
        )
    for run in runs:
        step = run.results.get("model_distribution", {})
        withheld, offline = (len(step.get(key, ())) for key in ("withheld", "offline"))
        if withheld or offline:
            yield (
                f"{run.name}: {withheld} clients keep their figures to themselves, "
                f"{offline} did not have the model yet; they are in no figure."
            )


def _was_tested(run: FinishedRun) -> bool:
    return any(run.results[group]["num_clients"] for group in GROUPS)


# What charts are drawn from, each with which runs ought to have it.
_FILES: Mapping[str, Callable[[FinishedRun], bool]] = {
    "rounds.jsonl": lambda run: bool(run.results["training"].get("num_rounds")),
    "clients.csv": _was_tested,
    "personalization.jsonl": _was_tested,
}


def missing_files(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on files that only some runs lack: charts go without those."""
    for name, expected in _FILES.items():
        runs = [run for setup in setups for run in setup.runs]
        there = {run.path for run in runs if (run.path / name).is_file()}
        for setup in setups if there else ():
            own = setup.runs
            lacking = [run for run in own if expected(run) and run.path not in there]
            if lacking and len(lacking) == len(own):
                yield f"{setup.label} has no {name}: its charts leave it out."
            elif lacking:
                yield (
                    f"{len(lacking)} of the {len(own)} runs of {setup.label} lack "
                    f"{name} ({', '.join(str(run.path) for run in lacking)}): its "
                    "charts are of the others."
                )


def metrics_of(setups: Iterable[Setup]) -> list[str]:
    """Return what the clients of some run were measured by, the accuracy first."""
    named = [one for setup in setups for run in setup.runs for one in run.metrics]
    return list(dict.fromkeys(named))
