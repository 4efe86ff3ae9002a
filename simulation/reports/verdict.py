"""The verdict of a report: the best setup, its gain, and the clients that lose."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from knnper.simulation.reports.accuracy_table import (
    ModelRow,
    is_apart,
    table_of,
)
from knnper.simulation.reports.client_table import ClientRow, clients_of, has_clients
from knnper.simulation.reports.estimate import WEAK, Estimate, estimate
from knnper.simulation.reports.finished_run import (
    GROUPS,
    FinishedRun,
    load_run,
)
from knnper.simulation.reports.setups import Setup, setups_of, split_of
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import percent

MOST_NAMED = 5  # clients of a kind in a table, and in a sentence fewer
_IN_A_SENTENCE = 3
_EQUAL = 0.0005  # a difference that would be written as 0.0 points


def verdict_of(setups: Sequence[Setup], rows: Sequence[ModelRow]) -> list[str]:
    """Return sentences on the best setup, the most important one first.

    Parameters
    ----------
    rows
        The table of the setups' accuracies.
    """
    by_group = {
        group: [row for row in rows if row.group == group and _is_measured(row)]
        for group in GROUPS
    }
    group = next((group for group in GROUPS if by_group[group]), None)
    if group is None:
        return ["No client has reported how often its model is right."]
    best, *others = sorted(by_group[group], key=_average, reverse=True)
    setup = _setup_of(best, setups)
    split = split_of(setups)
    sentences = [
        f"{best.label} is right for {_percent(best)} of the {group} clients' {split} "
        f"examples{_gain_phrase(setup, best)}{_degraded_phrase(setup, group)}."
    ]
    for row in by_group["unseen"] if group == "seen" else ():
        if row.setup == best.setup:
            gain, degraded = _gain_phrase(setup, row), _degraded_phrase(setup, "unseen")
            sentences.append(f"Unseen clients: {_percent(row)}{gain}{degraded}.")
    sentences += _caution(best)
    if others:
        sentences.append(_runner_up(setup, _setup_of(others[0], setups), group))
    losers = losers_of(setup)
    # A client without an error on its test examples is not served badly.
    lowest = [served for served in worst_of(setup) if served.client.accuracy < 1]
    if listed := losers or lowest:
        which = "Loses most" if losers else "Lowest accuracy"
        named = (_named(client, setup) for client in listed[:_IN_A_SENTENCE])
        sentences.append(f"{which}: {'; '.join(named)}.")
    return sentences


def verdict_of_run(folder: Path) -> list[str]:
    """Return the sentences on one finished run."""
    setups = setups_of([load_run(folder)])
    return verdict_of(setups, table_of(setups))


def _is_measured(row: ModelRow) -> bool:
    return not row.is_reference and row.figures["average"].mean is not None


def _average(row: ModelRow) -> float:
    return row.figures["average"].mean or 0.0


def _percent(row: ModelRow) -> str:
    return percent(_average(row))


def _setup_of(row: ModelRow, setups: Sequence[Setup]) -> Setup:
    return next(setup for setup in setups if setup.label == row.setup)


def _points(difference: Estimate) -> str:
    """Return the size of a difference in points, with half of its interval."""
    size = replace(difference, mean=abs(difference.mean or 0.0))
    return size.text().removesuffix(WEAK)


def _gain_phrase(setup: Setup, row: ModelRow) -> str:
    """Return by how much a model is better than the one it goes on from, if any."""
    gain, reference = row.figures["gain"], setup.runs[0].reference_title
    if gain.mean is None or setup.title == reference:
        return ""
    if abs(gain.mean) < _EQUAL:
        return f", as often as {reference}"
    return (
        f", {_points(gain)} points {'more' if gain.mean > 0 else 'less'} "
        f"than {reference}"
    )


def _degraded_phrase(setup: Setup, group: str) -> str:
    """Return how many clients of a group are worse off than with the global model."""
    if not is_apart(setup, group):
        return ""
    worse = total = 0
    for run in setup.runs:
        figures = run.figures(group)
        fraction = figures["fraction_degraded"]
        if fraction is None:
            continue
        tested = figures["num_clients"] - figures.get("num_empty", 0)
        total += tested
        worse += round(fraction * tested)
    if not total:
        return ""
    seeds = f" in {len(setup.runs)} seeds" if len(setup.runs) > 1 else ""
    number = str(worse) if worse else "none"
    clients = "client" if total == 1 else "clients"
    return f"; {number} of {total} {clients}{seeds} {_are(worse)} worse off"


def _are(number: int) -> str:
    return "is" if number < 2 else "are"


def _caution(best: ModelRow) -> list[str]:
    """Return how far the gain can be trusted, where it cannot."""
    average, gain = best.figures["average"], best.figures["gain"]
    if average.count == 1:
        return ["This is one seed: run more to know how much of it is chance."]
    if average.count == 2:
        return ["Two seeds are too few for an interval to compare by: run more."]
    if gain.mean is not None and not _is_clear(gain):
        return [f"The {gain.count} seeds do not tell this difference from 0."]
    return []


def _is_clear(difference: Estimate) -> bool:
    """Return whether the interval of a difference leaves 0 out."""
    half = difference.half_width
    return half is not None and abs(difference.mean or 0.0) > half


def _runner_up(best: Setup, second: Setup, group: str) -> str:
    """Return how far the second setup is behind, at the same seeds and splits."""
    others = {(run.seed, run.split_hash): run for run in second.runs}
    pairs = [
        (run.figures(group), others[run.seed, run.split_hash].figures(group))
        for run in best.runs
        if (run.seed, run.split_hash) in others
    ]
    name = "accuracy_weighted"
    behind = estimate(first[name] - other[name] for first, other in pairs)
    if behind.mean is None:
        return f"{second.label} is second; no seed is common to both."
    if abs(behind.mean) < _EQUAL:
        return f"{second.label} is as good."
    text = f"{second.label} is second, {_points(behind)} points behind"
    if behind.count > 1 and not _is_clear(behind):
        text += f"; {behind.count} seeds do not tell the two apart"
    return f"{text}."


@dataclass(frozen=True)
class Served:
    """A client and the run that it is of."""

    run: FinishedRun
    client: ClientRow

    @property
    def key(self) -> tuple[Path, str]:
        """Run and name, which no other client has both of."""
        return self.run.path, self.client.client

    @property
    def gain(self) -> float:
        """Its accuracy less that of the global model."""
        return self.client.accuracy - self.client.accuracy_global


def worst_of(setup: Setup) -> list[Served]:
    """Return the clients of all seeds with the lowest accuracies, the worst first.

    Of equal ones that with the most test examples comes first: it is the least likely
    to be there by chance.
    """
    return heapq.nsmallest(
        MOST_NAMED,
        _served(setup),
        key=lambda served: (served.client.accuracy, -served.client.num_test),
    )


def losers_of(setup: Setup) -> list[Served]:
    """Return the clients that their own model degrades, the largest loss first."""
    if not setup.has_reference:
        return []
    return heapq.nsmallest(
        MOST_NAMED,
        (served for served in _served(setup) if served.gain < 0),
        key=lambda served: (served.gain, -served.client.num_test),
    )


def _served(setup: Setup) -> Iterable[Served]:
    for run in setup.runs:
        if has_clients(run.path):
            yield from (Served(run, client) for client in clients_of(run.path))


def _named(served: Served, setup: Setup) -> str:
    client, several = served.client, len(setup.runs) > 1
    seed = f" of seed {served.run.seed}" if several else ""
    examples = "example" if client.num_test == 1 else "examples"
    reference = (
        f", global model {percent(client.accuracy_global)}"
        if setup.has_reference
        else ""
    )
    return (
        f"{client.client}{seed} ({percent(client.accuracy)} of {client.num_test} "
        f"{examples}{reference})"
    )


def worst_table(setup: Setup) -> Table | None:
    """Return the clients that lose most and those that are served worst, or None.

    A client that is both stands among the former.
    """
    losers = losers_of(setup)
    named = {served.key for served in losers}
    lowest = [served for served in worst_of(setup) if served.key not in named]
    lines = [
        *zip(losers, itertools.repeat("loses most"), strict=False),
        *zip(lowest, itertools.repeat("lowest accuracy"), strict=False),
    ]
    if not lines:
        return None
    several = len(setup.runs) > 1
    header = ["client", *(["seed"] if several else []), "group", "test examples"]
    header += ["accuracy, %", "global model, %", "gain, points", "why"]
    rows = []
    for served, why in lines:
        client = served.client
        compared = ["-", "-"]
        if setup.has_reference:
            sign = "+" if served.gain > 0 else ""
            gain = f"{sign}{100 * served.gain:.1f}"
            compared = [f"{100 * client.accuracy_global:.1f}", gain]
        seed = [str(served.run.seed)] if several else []
        group = "seen" if client.seen else "unseen"
        accuracy = f"{100 * client.accuracy:.1f}"
        numbers = [str(client.num_test), accuracy, *compared]
        rows.append([client.client, *seed, group, *numbers, why])
    return Table.of_cells(setup.label, [header, *rows])
