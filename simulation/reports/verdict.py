"""The verdict of a report: the best setup, its gain, and the clients that lose."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from knnper.simulation.reports.accuracy_table import ModelRow, is_apart, table_of
from knnper.simulation.reports.client_table import clients_of_setup
from knnper.simulation.reports.estimate import WEAK, Estimate, estimate
from knnper.simulation.reports.finished_run import GROUPS, load_run
from knnper.simulation.reports.setups import Setup, setups_of, split_of
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import percent

MOST_NAMED = 5  # clients of a kind in a table
_IN_A_SENTENCE = 3  # clients
_EQUAL = 0.0005  # smaller differences are written as 0.0 points


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
        return ["No client has reported the accuracy of its model."]
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
    losers, lowest = losers_of(setup), lowest_of(setup)
    # A client without an error on its test examples is not served badly.
    lowest = lowest[lowest["accuracy"] < 1]
    beginning = "Lowest accuracy" if losers.empty else "Loses most"
    clients = (lowest if losers.empty else losers).head(_IN_A_SENTENCE)
    if not clients.empty:
        described = "; ".join(_describe_clients(clients, setup))
        sentences.append(f"{beginning}: {described}.")
    return sentences


def verdict_of_run(folder: Path) -> list[str]:
    """Return the verdict on one finished run."""
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
    """Format the size of a difference in points, with half of its interval."""
    size = replace(difference, mean=abs(difference.mean or 0.0))
    return size.text().removesuffix(WEAK)


def _gain_phrase(setup: Setup, row: ModelRow) -> str:
    """Return the gain over the model that a setup personalises, if there is one."""
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
    """Return how many clients of a group the global model would serve better."""
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
    verb = "is" if worse < 2 else "are"
    clients = "client" if total == 1 else "clients"
    return f"; {number} of {total} {clients}{seeds} {verb} worse off"


def _caution(best: ModelRow) -> list[str]:
    """Return a warning if the seeds are too few, or do not show a gain."""
    average, gain = best.figures["average"], best.figures["gain"]
    if average.count == 1:
        return ["This is one seed: run more to know how much of it is chance."]
    if average.count == 2:
        return ["Two seeds are too few for an interval to compare by: run more."]
    if gain.mean is not None and not _is_clear(gain):
        return [f"The {gain.count} seeds cannot distinguish this difference from 0."]
    return []


def _is_clear(difference: Estimate) -> bool:
    """Return whether the interval of a difference excludes 0."""
    half = difference.half_width
    return half is not None and abs(difference.mean or 0.0) > half


def _runner_up(best: Setup, second: Setup, group: str) -> str:
    """Return how far the second setup is behind, over the same seeds and splits."""
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
        text += f"; {behind.count} seeds cannot distinguish the two"
    return f"{text}."


def lowest_of(setup: Setup) -> pd.DataFrame:
    """Return the clients of all seeds with the lowest accuracies, the lowest first.

    Of clients with equal accuracy, those with more test examples come first: chance
    explains their accuracy least.
    """
    clients = _clients_with_gain(setup)
    return clients.sort_values(
        ["accuracy", "num_test"], ascending=[True, False], kind="stable"
    ).head(MOST_NAMED)


def losers_of(setup: Setup) -> pd.DataFrame:
    """Return the clients that their own model degrades, the largest loss first."""
    clients = _clients_with_gain(setup)
    is_loser = (clients["gain"] < 0) & setup.has_reference
    return (
        clients[is_loser]
        .sort_values(["gain", "num_test"], ascending=[True, False], kind="stable")
        .head(MOST_NAMED)
    )


def _clients_with_gain(setup: Setup) -> pd.DataFrame:
    """Return the clients of all seeds with their gain over the global model."""
    clients = clients_of_setup(setup)
    return clients.assign(gain=clients["accuracy"] - clients["accuracy_global"])


def _describe_clients(clients: pd.DataFrame, setup: Setup) -> list[str]:
    phrases = []
    for client in clients.itertuples():
        seed = f" of seed {client.seed}" if len(setup.runs) > 1 else ""
        examples = "example" if client.num_test == 1 else "examples"
        reference = f", global model {percent(client.accuracy_global)}"
        phrases.append(
            f"{client.client}{seed} ({percent(client.accuracy)} of {client.num_test} "
            f"{examples}{reference if setup.has_reference else ''})"
        )
    return phrases


def worst_table(setup: Setup) -> Table | None:
    """Return the clients that lose most and then those with the lowest accuracies.

    A client that is both is listed among the former. None if no client was tested.
    """
    losers, lowest = losers_of(setup), lowest_of(setup)
    lowest = lowest.drop(index=lowest.index.intersection(losers.index))
    clients = pd.concat(
        [losers.assign(why="loses most"), lowest.assign(why="lowest accuracy")]
    )
    if clients.empty:
        return None
    has_seeds = len(setup.runs) > 1
    header = [
        "client",
        *(["seed"] if has_seeds else []),
        "group",
        "test examples",
        "accuracy, %",
        "global model, %",
        "gain, points",
        "why",
    ]
    rows = []
    for client in clients.itertuples():
        compared = ["-", "-"]
        if setup.has_reference:
            sign = "+" if client.gain > 0 else ""
            gain = f"{sign}{100 * client.gain:.1f}"
            compared = [f"{100 * client.accuracy_global:.1f}", gain]
        rows.append(
            [
                client.client,
                *([str(client.seed)] if has_seeds else []),
                "seen" if client.seen else "unseen",
                str(client.num_test),
                f"{100 * client.accuracy:.1f}",
                *compared,
                client.why,
            ]
        )
    return Table.of_cells(setup.label, [header, *rows])
