"""The table of a report: one row for each model and group of clients."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.metrics import ACCURACY, called, gain
from knnper.server.results import figure_of
from knnper.simulation.reports.client_table import (
    clients_of,
    fraction_degraded_against,
    has_clients,
)
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.finished_run import (
    GROUPS,
    FinishedRun,
    load_run,
)
from knnper.simulation.reports.provenance import FederatedData, model_of
from knnper.simulation.reports.setups import Setup, setups_of
from knnper.simulation.reports.table import Table, csv_text
from knnper.strategies.catalogue import METHODS

# What a row calls the figures of a metric, see `figure_of`.
FIGURES: Mapping[str, str] = {
    "average": "weighted",
    "mean": "mean",
    "bottom_decile": "bottom_decile",
    "worst": "worst",
    "fraction_degraded": "fraction_degraded",
}
_POOLED = ("ece", "log_loss")  # and those of all examples together, by their own names
FEDAVG = METHODS["fedavg"].title
VS_FEDAVG = "fraction_degraded_vs_fedavg"
VS_GLOBAL = "global"  # the unpersonalised model of the same run, see `degraded_vs`

# By seed the split, and the clients' metric with FedAvg's model.
Fedavg = Mapping[int | None, tuple[str, Mapping[str, float]]]
Model = tuple[object, ...]

# These tell models apart whose states are not known, or that were tested on others.
_TELLING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")


def degraded_vs(model: str) -> str:
    """Return what tables call `fraction_degraded` of results against a model."""
    return f"degraded vs {model}"


@dataclass(frozen=True)
class ModelRow:
    """How one model did on one group of clients."""

    label: str  # no two rows of a group share one
    method: str
    setup: str
    group: str
    runs: tuple[str, ...]  # the names of the folders, one a seed
    model: str
    metric: str
    # By the names of `FIGURES`; ``gain`` is over the unpersonalised model of the same
    # run, `VS_FEDAVG` against the one FedAvg of the table over the same split.
    figures: Mapping[str, Estimate]
    num_clients: int  # of the first run, as the rounds
    num_rounds: int | None
    seconds: float | None  # training, and personalisation where there is one: mean
    is_reference: bool  # an unpersonalised model

    def text(self, name: str, *, sign: bool = False) -> str:
        """Return a figure as text, in percent where it is a fraction."""
        found = self.figures[name]
        if called(self.metric).is_fraction or "degraded" in name:
            return found.percent() if sign else found.text()
        return found.text(1, 3)

    @property
    def times(self) -> list[str]:
        """Rounds and seconds as text."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return ["-" if self.num_rounds is None else str(self.num_rounds), seconds]


def table_of(setups: Sequence[Setup], metric: str = ACCURACY) -> list[ModelRow]:
    """Return the rows of a table that compares setups: seen clients, then unseen."""
    fedavg = _fedavg_of(setups, metric)
    found = [
        (_model(setup, is_reference), _row(setup, group, fedavg, is_reference, metric))
        for group in GROUPS
        for setup in setups
        if setup.runs[0].figures(group)["num_clients"]
        for is_reference in (True, False)
        if not is_reference or is_apart(setup, group)
    ]
    models: dict[str, set[Model]] = defaultdict(set)
    for model, row in found:
        models[row.method].add(model)
    shown = {(row.group, model) for model, row in found if not row.is_reference}
    table, labels = list[ModelRow](), dict[Model, str]()
    for model, row in found:
        if row.is_reference:
            # An unpersonalised model is called the same in all groups of clients.
            whose = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            label = labels.setdefault(model, row.label + whose)
            if (row.group, model) in shown:
                continue
            shown.add((row.group, model))
            row = replace(row, label=label)
        table.append(row)
    return table


def tables_of_run(folder: Path) -> list[list[list[str]]]:
    """Return the table of one run, and one of each other metric, see `as_cells`."""
    run = load_run(folder)
    return [as_cells(table_of(setups_of([run]), metric)) for metric in run.metrics]


def as_documents(rows: Iterable[ModelRow], over: FederatedData) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is not known."""
    before = ("model", "label", "method", "setup", "group", "metric")
    behind = ("num_clients", "num_rounds", "seconds", "is_reference")
    documents = []
    for row in rows:
        document: dict[str, Any] = {"data": over.data, "partition": over.partition}
        document |= {name: getattr(row, name) for name in before}
        document["runs"] = list(row.runs)
        for name, one in row.figures.items():
            document |= one.flat(name)
        documents.append(document | {name: getattr(row, name) for name in behind})
    return documents


def as_csv(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return what `as_documents` does, a column each; empty where there is none."""
    return csv_text(
        [
            {**one, "runs": " ".join(one["runs"])}
            | {"is_reference": str(one["is_reference"])}
            for one in documents
        ]
    )


def as_cells(rows: Sequence[ModelRow]) -> list[list[str]]:
    """Return a header and the rows as text; with the seeds where there are several."""
    several = any(len(row.runs) > 1 for row in rows)
    degraded = degraded_columns(rows)
    others = {called(row.metric).title for row in rows if row.metric != ACCURACY}
    average = " ".join(["average", *others])
    header = ["method", "group", average, "bottom decile", *degraded]
    header += ["clients", *(["seeds"] if several else []), "rounds", "seconds"]
    shown = ("average", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        figures = [row.text(name, sign=True) for name in shown]
        seeds = [str(len(row.runs))] if several else []
        numbers = [*figures, str(row.num_clients), *seeds, *row.times]
        cells.append([row.label, row.group, *numbers])
    return cells


def table_of_group(rows: Sequence[ModelRow], degraded: Mapping[str, str]) -> Table:
    """Return what a report shows of a group of clients, all rows of one metric."""
    metric, group = called(rows[0].metric), rows[0].group.capitalize()
    named = "" if rows[0].metric == ACCURACY else f": {metric.title}"
    percent, points = (", %", ", points") if metric.is_fraction else ("", "")
    header = ["method", f"average{percent}", f"gain{points}", f"bottom decile{percent}"]
    header += [*(f"{name}, %" for name in degraded), "calibration error, %", "log-loss"]
    header += ["clients", "seeds", "rounds", "seconds"]
    shown = ("average", "gain", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        pooled = [row.figures["ece"].text(), row.figures["log_loss"].text(1, 3)]
        counts = [str(row.num_clients), str(len(row.runs)), *row.times]
        cells.append([row.label, *map(row.text, shown), *pooled, *counts])
    return Table.of_cells(f"{group} clients{named}", cells)


def degraded_columns(rows: Sequence[ModelRow]) -> dict[str, str]:
    """Return the columns of fractions degraded."""
    # That against FedAvg is one where it says more than that against the own global.
    columns = {degraded_vs(VS_GLOBAL): "fraction_degraded"}
    if any(
        row.figures[VS_FEDAVG].mean not in (None, row.figures["fraction_degraded"].mean)
        for row in rows
    ):
        columns[degraded_vs(FEDAVG)] = VS_FEDAVG
    return columns


def _fedavg_of(setups: Sequence[Setup], metric: str) -> Fedavg:
    """Return FedAvg's model of a table; nothing where there is none, or several."""
    whole = [setup for setup in setups if setup.title == FEDAVG]
    column = "accuracy" if whole else "accuracy_global"
    goes_on = [one for one in setups if one.runs[0].reference_title == FEDAVG]
    found = {_model(one, not whole): one for one in whole or goes_on}
    if len(whole) > 1 or len(setups) < 2 or len(found) != 1:
        return {}
    (setup,) = found.values()
    return {
        run.seed: (
            run.split_hash,
            {one.client: getattr(one, column) for one in clients_of(run.path, metric)},
        )
        for run in setup.runs
        if has_clients(run.path)
    }


def _vs_fedavg(
    run: FinishedRun, group: str, fedavg: Fedavg, is_reference: bool, metric: str
) -> float | None:
    split, values = fedavg.get(run.seed, ("", {}))
    if split != run.split_hash or not has_clients(run.path):
        return None
    is_seen = group == "seen"
    clients = [one for one in clients_of(run.path, metric) if one.seen == is_seen]
    if is_reference:
        clients = [replace(one, accuracy=one.accuracy_global) for one in clients]
    return fraction_degraded_against(clients, values, metric)


def is_apart(setup: Setup, group: str) -> bool:
    """Return whether the unpersonalised model means anything, and is another one."""
    personal = [dict(run.figures(group)) for run in setup.runs]
    return setup.has_reference and any(one.pop("global") != one for one in personal)


def _row(
    setup: Setup, group: str, fedavg: Fedavg, is_reference: bool, metric: str
) -> ModelRow:
    first = setup.runs[0]
    by_seed = [run.figures(group) for run in setup.runs]
    if is_reference:
        by_seed = [one["global"] for one in by_seed]
    names = {name: figure_of(metric, key) for name, key in FIGURES.items()}
    names |= {name: name for name in _POOLED}
    figures = {
        name: estimate(one.get(key) for one in by_seed) for name, key in names.items()
    }
    is_compared = setup.has_reference and not is_reference
    gains = (_gain(one, metric) for one in by_seed)
    figures["gain"] = estimate(gains if is_compared else ())
    figures[VS_FEDAVG] = estimate(
        _vs_fedavg(run, group, fedavg, is_reference, metric) for run in setup.runs
    )
    method = str(first.reference_title) if is_reference else setup.title
    return ModelRow(
        label=method if is_reference else setup.label,
        method=method,
        setup=setup.label,
        group=group,
        runs=tuple(run.name for run in setup.runs),
        model=model_of(first),
        metric=metric,
        figures=figures,
        num_clients=by_seed[0]["num_clients"],
        num_rounds=first.results["training"].get("num_rounds"),
        seconds=estimate(_seconds(run, is_reference) for run in setup.runs).mean,
        is_reference=is_reference,
    )


def _model(setup: Setup, is_reference: bool) -> Model:
    """Return by what a model is known: setups may share one, whatever they add."""
    title = setup.runs[0].reference_title if is_reference else setup.title
    results = [run.results[group] for group in GROUPS for run in setup.runs]
    found = [one["global"] for one in results] if is_reference else results
    return (
        title,
        *(run.results["training"].get("state_sha256") for run in setup.runs),
        *(one.get(name) for one in found for name in _TELLING),
    )


def _gain(figures: Mapping[str, Any], metric: str) -> float | None:
    name = figure_of(metric, FIGURES["average"])
    own, reference = (one.get(name) for one in (figures, figures.get("global", {})))
    return None if own is None or reference is None else gain(metric, own, reference)


def _seconds(run: FinishedRun, is_reference: bool) -> float | None:
    training = run.results["training"]
    seconds: float | None = training.get("seconds")
    if seconds is None or is_reference:
        return seconds
    return seconds + float(training.get("personalization_seconds", 0.0))
