"""The table of a report: a row for each model and group of clients."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.metrics import ACCURACY, called, gain
from knnper.server.results import figure_of
from knnper.simulation.reports.client_table import (
    fraction_degraded_against,
    has_clients,
    read_clients,
)
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.finished_run import GROUPS, FinishedRun, load_run
from knnper.simulation.reports.provenance import FederatedData, model_of
from knnper.simulation.reports.setups import Setup, setups_of
from knnper.simulation.reports.table import Table, csv_text
from knnper.strategies.catalogue import METHODS

# Figures of a row by their names in results.json, see `figure_of`.
FIGURES: Mapping[str, str] = {
    "average": "weighted",
    "mean": "mean",
    "bottom_decile": "bottom_decile",
    "worst": "worst",
    "fraction_degraded": "fraction_degraded",
}
_POOLED = ("ece", "log_loss")  # figures of all examples together
FEDAVG = METHODS["fedavg"].title
VS_FEDAVG = "fraction_degraded_vs_fedavg"
VS_GLOBAL = "global"  # the unpersonalised model of the same run, see `degraded_vs`
# Figures that distinguish models with unknown fingerprints, or other test clients.
_DISTINGUISHING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")
# FedAvg's split and its clients' metric, by seed.
FedavgClients = Mapping[int | None, tuple[str, Mapping[str, float]]]
Model = tuple[object, ...]


def degraded_vs(model: str) -> str:
    """Return the column title of the fraction degraded against a model."""
    return f"degraded vs {model}"


@dataclass(frozen=True)
class ModelRow:
    """The figures of one model on one group of clients.

    Attributes
    ----------
    label
        Unique in a group.
    setup
        The label of the setup.
    runs
        The names of the runs' folders, one a seed.
    figures
        By the names of `FIGURES`, with ``gain`` over the unpersonalised model of the
        same run and `VS_FEDAVG` against the table's one FedAvg over the same split.
    num_clients, num_rounds
        Of the first run.
    seconds
        Mean time of training and, where there is one, personalisation.
    is_reference
        Whether it is an unpersonalised model.
    """

    label: str
    method: str
    setup: str
    group: str
    runs: tuple[str, ...]
    model: str
    metric: str
    figures: Mapping[str, Estimate]
    num_clients: int
    num_rounds: int | None
    seconds: float | None
    is_reference: bool

    def text(self, name: str, *, sign: bool = False) -> str:
        """Format a figure, in percent if it is a fraction; ``sign`` adds the unit."""
        figure = self.figures[name]
        if called(self.metric).is_fraction or "degraded" in name:
            return figure.percent() if sign else figure.text()
        return figure.text(scale=1, digits=3)

    @property
    def times(self) -> list[str]:
        """Rounds and seconds as text."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return ["-" if self.num_rounds is None else str(self.num_rounds), seconds]


def table_of(setups: Sequence[Setup], metric: str = ACCURACY) -> list[ModelRow]:
    """Return the rows of a table that compares setups: seen clients, then unseen.

    The unpersonalised model of a setup has its own row before it; setups that share one
    share that row.
    """
    fedavg = _fedavg_clients(setups, metric)
    candidates = [
        (
            _model_key(setup, is_reference),
            _row_of(setup, group, fedavg, is_reference, metric),
        )
        for group in GROUPS
        for setup in setups
        if setup.runs[0].figures(group)["num_clients"]
        for is_reference in (True, False)
        if not is_reference or is_apart(setup, group)
    ]
    models: dict[str, set[Model]] = defaultdict(set)
    for model, row in candidates:
        models[row.method].add(model)
    shown = {(row.group, model) for model, row in candidates if not row.is_reference}
    table = list[ModelRow]()
    labels: dict[Model, str] = {}
    for model, row in candidates:
        if row.is_reference:
            # An unpersonalised model has the same name in all groups of clients.
            suffix = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            label = labels.setdefault(model, row.label + suffix)
            if (row.group, model) in shown:
                continue
            shown.add((row.group, model))
            row = replace(row, label=label)
        table.append(row)
    return table


def tables_of_run(folder: Path) -> list[list[list[str]]]:
    """Return the table of one run for each of its metrics, see `as_cells`."""
    run = load_run(folder)
    return [as_cells(table_of(setups_of([run]), metric)) for metric in run.metrics]


def as_documents(rows: Iterable[ModelRow], over: FederatedData) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is unknown."""
    documents = []
    for row in rows:
        document: dict[str, Any] = {
            "data": over.data,
            "partition": over.partition,
            "model": row.model,
            "label": row.label,
            "method": row.method,
            "setup": row.setup,
            "group": row.group,
            "metric": row.metric,
            "runs": list(row.runs),
        }
        for name, figure in row.figures.items():
            document |= figure.flat(name)
        document |= {
            "num_clients": row.num_clients,
            "num_rounds": row.num_rounds,
            "seconds": row.seconds,
            "is_reference": row.is_reference,
        }
        documents.append(document)
    return documents


def as_csv(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return the documents of `as_documents` as CSV, with a column for each key."""
    return csv_text(
        [
            {
                **document,
                "runs": " ".join(document["runs"]),
                "is_reference": str(document["is_reference"]),
            }
            for document in documents
        ]
    )


def as_cells(rows: Sequence[ModelRow]) -> list[list[str]]:
    """Return header and rows as text; with the seeds where there are several."""
    has_seeds = any(len(row.runs) > 1 for row in rows)
    degraded = degraded_columns(rows)
    metrics = {called(row.metric).title for row in rows if row.metric != ACCURACY}
    header = [
        "method",
        "group",
        " ".join(["average", *metrics]),
        "bottom decile",
        *degraded,
        "clients",
        *(["seeds"] if has_seeds else []),
        "rounds",
        "seconds",
    ]
    shown = ("average", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        figures = [row.text(name, sign=True) for name in shown]
        seeds = [str(len(row.runs))] if has_seeds else []
        numbers = [*figures, str(row.num_clients), *seeds, *row.times]
        cells.append([row.label, row.group, *numbers])
    return cells


def table_of_group(rows: Sequence[ModelRow], degraded: Mapping[str, str]) -> Table:
    """Return a report's table of one group of clients, all rows of one metric."""
    metric = called(rows[0].metric)
    percent, points = (", %", ", points") if metric.is_fraction else ("", "")
    header = [
        "method",
        f"average{percent}",
        f"gain{points}",
        f"bottom decile{percent}",
        *(f"{name}, %" for name in degraded),
        "calibration error, %",
        "log-loss",
        "clients",
        "seeds",
        "rounds",
        "seconds",
    ]
    shown = ("average", "gain", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        pooled = [row.figures["ece"].text(), row.figures["log_loss"].text(1, 3)]
        counts = [str(row.num_clients), str(len(row.runs)), *row.times]
        cells.append([row.label, *map(row.text, shown), *pooled, *counts])
    suffix = "" if rows[0].metric == ACCURACY else f": {metric.title}"
    return Table.of_cells(f"{rows[0].group.capitalize()} clients{suffix}", cells)


def degraded_columns(rows: Sequence[ModelRow]) -> dict[str, str]:
    """Return the columns of fractions degraded: their figures by title.

    The comparison with FedAvg is one only where it differs from that with the run's own
    global model.
    """
    columns = {degraded_vs(VS_GLOBAL): "fraction_degraded"}
    if any(
        row.figures[VS_FEDAVG].mean not in (None, row.figures["fraction_degraded"].mean)
        for row in rows
    ):
        columns[degraded_vs(FEDAVG)] = VS_FEDAVG
    return columns


def is_apart(setup: Setup, group: str) -> bool:
    """Return whether a setup has a trained global model with figures of its own."""
    figures = [dict(run.figures(group)) for run in setup.runs]
    return setup.has_reference and any(
        of_run.pop("global") != of_run for of_run in figures
    )


def _fedavg_clients(setups: Sequence[Setup], metric: str) -> FedavgClients:
    """Read the clients' metric with FedAvg's model; empty without one, or of several.

    FedAvg is a setup of its own, or else the global model of those built on it.
    """
    of_fedavg = [setup for setup in setups if setup.title == FEDAVG]
    column = "accuracy" if of_fedavg else "accuracy_global"
    built_on = [setup for setup in setups if setup.runs[0].reference_title == FEDAVG]
    models = {
        _model_key(setup, is_reference=not of_fedavg): setup
        for setup in of_fedavg or built_on
    }
    if len(of_fedavg) > 1 or len(setups) < 2 or len(models) != 1:
        return {}
    (setup,) = models.values()
    by_seed = {}
    for run in setup.runs:
        if has_clients(run.path):
            clients = read_clients(run.path, metric)
            values = dict(zip(clients["client"], clients[column], strict=True))
            by_seed[run.seed] = (run.split_hash, values)
    return by_seed


def _degraded_vs_fedavg(
    run: FinishedRun, group: str, fedavg: FedavgClients, is_reference: bool, metric: str
) -> float | None:
    split, values = fedavg.get(run.seed, ("", {}))
    if split != run.split_hash or not has_clients(run.path):
        return None
    clients = read_clients(run.path, metric)
    clients = clients[clients["seen"] == (group == "seen")]
    if is_reference:
        clients = clients.assign(accuracy=clients["accuracy_global"])
    return fraction_degraded_against(clients, values, metric)


def _row_of(
    setup: Setup, group: str, fedavg: FedavgClients, is_reference: bool, metric: str
) -> ModelRow:
    first = setup.runs[0]
    by_seed = [run.figures(group) for run in setup.runs]
    if is_reference:
        by_seed = [of_run["global"] for of_run in by_seed]
    names = {name: figure_of(metric, key) for name, key in FIGURES.items()}
    names |= {name: name for name in _POOLED}
    figures = {
        name: estimate(of_run.get(key) for of_run in by_seed)
        for name, key in names.items()
    }
    is_compared = setup.has_reference and not is_reference
    gains = [_gain_over_global(of_run, metric) for of_run in by_seed]
    figures["gain"] = estimate(gains if is_compared else ())
    figures[VS_FEDAVG] = estimate(
        _degraded_vs_fedavg(run, group, fedavg, is_reference, metric)
        for run in setup.runs
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


def _model_key(setup: Setup, is_reference: bool) -> Model:
    """Return a key that is equal for setups with the same model."""
    title = setup.runs[0].reference_title if is_reference else setup.title
    groups = [run.results[group] for group in GROUPS for run in setup.runs]
    figures = [group["global"] for group in groups] if is_reference else groups
    return (
        title,
        *(run.results["training"].get("state_sha256") for run in setup.runs),
        *(of_group.get(name) for of_group in figures for name in _DISTINGUISHING),
    )


def _gain_over_global(figures: Mapping[str, Any], metric: str) -> float | None:
    name = figure_of(metric, FIGURES["average"])
    personal, reference = figures.get(name), figures.get("global", {}).get(name)
    return (
        None
        if personal is None or reference is None
        else gain(metric, personal, reference)
    )


def _seconds(run: FinishedRun, is_reference: bool) -> float | None:
    training = run.results["training"]
    seconds: float | None = training.get("seconds")
    if seconds is None or is_reference:
        return seconds
    return seconds + float(training.get("personalization_seconds", 0.0))
