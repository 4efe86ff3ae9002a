"""Setups: runs that differ in the seed alone, and how setups differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from knnper.simulation.origin import CODE, fingerprint_in
from knnper.simulation.reports.finished_run import GROUPS, VALIDATION, FinishedRun
from knnper.simulation.reports.text import as_text

MOST_IN_LABEL = 3  # settings in a label; if more differ it has the run's name
ABSENT = "-"


@dataclass(frozen=True)
class Setup:
    """Runs that differ in the seed alone: one row of a table, one line of a chart.

    Attributes
    ----------
    label
        Its name in tables and charts, unique among the setups.
    runs
        In the order of their seeds.
    """

    title: str
    label: str
    runs: tuple[FinishedRun, ...]

    @property
    def has_reference(self) -> bool:
        """Whether it has a trained global model to compare with."""
        return self.runs[0].reference_title is not None


def setups_of(runs: Iterable[FinishedRun]) -> list[Setup]:
    """Group runs into setups, in the order of each one's first run."""
    # A second run with the same seed is no further evidence: it makes another setup.
    kinds: dict[tuple[str, str, int], list[FinishedRun]] = {}
    times: Counter[tuple[str, str, int | None]] = Counter()
    for run in runs:
        repetition = times[run.label, run.kind, run.seed]
        kinds.setdefault((run.label, run.kind, repetition), []).append(run)
        times[run.label, run.kind, run.seed] += 1
    groups = [sorted(group, key=lambda run: run.seed or 0) for group in kinds.values()]
    labels: dict[int, str] = {}
    names = [group[0].label or group[0].title for group in groups]
    for name in set(names):
        same = [place for place, other in enumerate(names) if other == name]
        suffixes = _distinguish([groups[place][0] for place in same])
        labels.update(zip(same, (name + suffix for suffix in suffixes), strict=True))
    return [
        Setup(group[0].title, labels[place], tuple(group))
        for place, group in enumerate(groups)
    ]


def split_of(setups: Sequence[Setup]) -> str:
    """Return the split that clients were evaluated on; setups of one table share it."""
    return setups[0].runs[0].evaluated_on


def metrics_of(setups: Iterable[Setup]) -> list[str]:
    """Return the metrics of the clients of any run, the accuracy first."""
    metrics = [name for setup in setups for run in setup.runs for name in run.metrics]
    return list(dict.fromkeys(metrics))


def departures(firsts: Sequence[FinishedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the settings in which runs, one of each setup, differ; and their cells."""
    settings = [run.settings for run in firsts]
    keys = [
        key
        for key in dict.fromkeys(key for of_run in settings for key in of_run)
        if len({as_text(of_run[key]) for of_run in settings if key in of_run}) > 1
    ]
    cells = [
        [as_text(of_run[key]) if key in of_run else ABSENT for key in keys]
        for of_run in settings
    ]
    return keys, cells


def in_common(firsts: Sequence[FinishedRun]) -> dict[str, str]:
    """Return the settings that have the same value in all runs, as text."""
    first, *others = [run.settings for run in firsts]
    return {
        key: as_text(value)
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def _distinguish(firsts: Sequence[FinishedRun]) -> list[str]:
    """Return a suffix for each of several runs with one title.

    The settings that differ, if they are few and suffice; else the run's name, and
    where that does not suffice its path.
    """
    if len(firsts) == 1:
        return [""]
    keys, cells = departures(firsts)
    ends = [key.rpartition(".")[2] for key in keys]
    short = [
        key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)
    ]
    by_settings = [
        "".join(
            f", {key} {cell}"
            for key, cell in zip(short, of_run, strict=True)
            if cell != ABSENT
        )
        for of_run in cells
    ]
    by_names = [f" ({run.name})" for run in firsts]
    for suffixes in (by_settings if 0 < len(keys) <= MOST_IN_LABEL else [], by_names):
        if len(set(suffixes)) == len(firsts):
            return suffixes
    return [f" ({run.path})" for run in firsts]


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what limits a comparison of the setups."""
    runs = [run for setup in setups for run in setup.runs]
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
    versions = [version for run in runs if (version := fingerprint_in(run.path))]
    if len(set(versions)) > 1:
        yield (
            f"The runs were not made by the same code: {CODE} has {len(set(versions))} "
            f"versions in {len(versions)} runs. That may be why figures differ."
        )
    for run in runs:
        distribution = run.results.get("model_distribution", {})
        withheld = len(distribution.get("withheld", ()))
        offline = len(distribution.get("offline", ()))
        if withheld or offline:
            yield (
                f"{run.name}: {withheld} clients withhold their figures, {offline} did "
                "not have the model yet; they are in no figure."
            )


def _was_tested(run: FinishedRun) -> bool:
    return any(run.results[group]["num_clients"] for group in GROUPS)


# The files that charts need, each with a test whether a run should have it.
_FILES: Mapping[str, Callable[[FinishedRun], bool]] = {
    "rounds.jsonl": lambda run: bool(run.results["training"].get("num_rounds")),
    "clients.csv": _was_tested,
    "personalization.jsonl": _was_tested,
}


def missing_files(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on files that only some runs lack, and charts therefore too."""
    for name, is_expected in _FILES.items():
        runs = [run for setup in setups for run in setup.runs]
        if not any((run.path / name).is_file() for run in runs):
            continue
        for setup in setups:
            lacking = [
                run
                for run in setup.runs
                if is_expected(run) and not (run.path / name).is_file()
            ]
            if lacking and len(lacking) == len(setup.runs):
                yield f"{setup.label} has no {name}: its charts leave it out."
            elif lacking:
                yield (
                    f"{len(lacking)} of the {len(setup.runs)} runs of {setup.label} "
                    f"lack {name} ({', '.join(str(run.path) for run in lacking)}): its "
                    "charts are of the others."
                )
