"""Whether setups can be compared, and what is missing of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from simulation.batch.code import CODE
from simulation.reporting.runs import GROUPS, VALIDATION, Run
from simulation.reporting.setups import Setup


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what makes the setups hard to compare."""
    runs = [run for setup in setups for run in setup.runs]
    yield from _tuning(runs)
    if len({tuple(run.seed for run in setup.runs) for setup in setups}) > 1:
        yield (
            "Not all setups have the same seeds; their means are over different splits "
            "of the data."
        )
    splits: dict[int | None, set[str]] = defaultdict(set)
    for run in runs:
        splits[run.seed].add(str(run.manifest.get("partition_hash")))
    if any(len(hashes) > 1 for hashes in splits.values()):
        yield (
            "Runs with the same seed have different splits of the data: compare their "
            "averages with care, and their clients not at all."
        )
    yield from _code(runs)
    for setup in setups:
        yield from _missing_clients(setup)


def missing_files(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on files that only some runs lack: charts go without those.

    What no run has is told in the place of the chart.
    """
    for name, expected in _FILES.items():
        if not any((run.path / name).is_file() for one in setups for run in one.runs):
            continue
        for setup in setups:
            if lacking := _lacking(setup, name, expected):
                yield _lack(setup, lacking, name)


def _tuning(runs: Sequence[Run]) -> Iterator[str]:
    """Yield that figures are of validation data; a split makes a table of its own."""
    if any(run.evaluated_on == VALIDATION for run in runs):
        yield (
            "These runs were evaluated on validation data (partition.evaluate_on: "
            "validation). Such figures choose settings; they are no results on test "
            "data."
        )


def _code(runs: Sequence[Run]) -> Iterator[str]:
    """Yield that more than one version of the code made the runs that tell theirs."""
    versions = [version for version in map(_version, runs) if version]
    if len(set(versions)) > 1:
        yield (
            f"The runs were not made by the same code: {CODE} has "
            f"{len(set(versions))} versions in {len(versions)} runs. What changed "
            "between them may be what makes the figures differ."
        )


def _version(run: Run) -> str:
    """Return the fingerprint of the code that made a run; empty is not known."""
    path = run.path / CODE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _missing_clients(setup: Setup) -> Iterator[str]:
    for run in setup.runs:
        hand_over = run.results.get("hand_over", {})
        num_withheld = len(hand_over.get("withheld", ()))
        num_away = len(hand_over.get("away", ()))
        if num_withheld or num_away:
            yield (
                f"{run.name}: {num_withheld} clients keep their figures to themselves, "
                f"{num_away} did not have the model yet; they are in no figure."
            )


def _was_tested(run: Run) -> bool:
    return any(run.results[group]["num_clients"] for group in GROUPS)


def _was_trained(run: Run) -> bool:
    return bool(run.results["training"].get("num_rounds"))


_FILES: Mapping[str, Callable[[Run], bool]] = {
    "rounds.jsonl": _was_trained,
    "clients.csv": _was_tested,
    "personalization.jsonl": _was_tested,
}
"""What charts are drawn from, each with which runs ought to have it."""


def _lacking(setup: Setup, name: str, expected: Callable[[Run], bool]) -> list[Run]:
    return [
        run for run in setup.runs if expected(run) and not (run.path / name).is_file()
    ]


def _lack(setup: Setup, lacking: Sequence[Run], name: str) -> str:
    if len(lacking) == len(setup.runs):
        return f"{setup.label} has no {name}: the charts of that file leave it out."
    places = ", ".join(str(run.path) for run in lacking)
    told = (
        f"{len(lacking)} of the {len(setup.runs)} runs of {setup.label} lack {name} "
        f"({places}): "
    )
    return f"{told}the charts of that file are of the others."
