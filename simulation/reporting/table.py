"""How the runs did: a row a setup and group of clients, over the seeds."""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulation.intervals import Estimate, estimate
from simulation.reporting.client_rows import (
    ClientRow,
    clients_of,
    fraction_degraded_against,
    has_clients,
)
from simulation.reporting.federated_data import FederatedData, model_of
from simulation.reporting.runs import GROUPS, Run
from simulation.reporting.setups import Setup, setups_of
from simulation.showing import VS_GLOBAL, degraded_vs
from strategies.catalogue import METHODS

FIGURES: Mapping[str, str] = {
    "average": "accuracy_weighted",
    "mean": "accuracy_mean",
    "bottom_decile": "accuracy_bottom_decile",
    "worst": "accuracy_worst",
    "fraction_degraded": "fraction_degraded",
    "ece": "ece",
    "log_loss": "log_loss",
}
"""What a row calls the figures of `server.results.Summary`."""

FEDAVG = METHODS["fedavg"].title
VS_FEDAVG = "fraction_degraded_vs_fedavg"


@dataclass(frozen=True)
class Row:
    """How one model did on one group of clients.

    Attributes
    ----------
    label
        The setup's; of an unpersonalised model, that model's. No two rows of a group
        share one.
    method
        The method's title.
    setup
        The setup's label.
    group
        ``seen`` or ``unseen``.
    runs
        The names of the runs' folders, one a seed.
    model
        What is trained, with its settings.
    figures
        By the names of `FIGURES`, over the seeds; and ``gain``, by how much the average
        is above that of the unpersonalised model of the same run. It and the fraction
        degraded have no value where that model means nothing. `VS_FEDAVG` is the
        fraction degraded against FedAvg's model with the same seed; it has no value
        where the table has not just one such model over the same split.
    num_clients, num_rounds
        Of the first run; None is not known.
    seconds
        What training took, with the hand-over for a personalised model: mean.
    is_reference
        Whether it is the unpersonalised model of a method that goes on from it.
    """

    label: str
    method: str
    setup: str
    group: str
    runs: tuple[str, ...]
    model: str
    figures: Mapping[str, Estimate]
    num_clients: int
    num_rounds: int | None
    seconds: float | None
    is_reference: bool


_TELLING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")


@dataclass(frozen=True)
class _Model:
    """By what a model is known: setups may share one, whatever they add to it.

    Attributes
    ----------
    title
        What tables call it.
    states
        Fingerprints of the server's last states, one a seed; None is not known.
    figures
        What it did on each group of clients, by seed. They tell models apart whose
        states are not known, and the same one that was tested on other data.
    """

    title: str
    states: tuple[str | None, ...]
    figures: tuple[tuple[object, ...], ...]


def table_of(setups: Sequence[Setup]) -> list[Row]:
    """Return the rows of a table that compares setups: seen clients, then unseen.

    A setup gives one row a group, and one more for its unpersonalised model where that
    differs. Setups that trained the same global model share its row.

    Raises
    ------
    RunError
        If the file of a run's clients is damaged.
    """
    fedavg = _fedavg_of(setups)
    found = [
        one
        for group in GROUPS
        for setup in setups
        for one in _rows(setup, group, fedavg)
    ]
    shown = {(row.group, model) for model, row in found if not row.is_reference}
    table = []
    for model, row in found:
        if not row.is_reference or (row.group, model) not in shown:
            table.append((model, row))
            shown.add((row.group, model))
    labels = _reference_labels(found)
    return [
        replace(row, label=labels[model]) if row.is_reference else row
        for model, row in table
    ]


def table_of_run(run: Run) -> list[Row]:
    """Return the rows of one run."""
    return table_of(setups_of([run]))


def as_documents(rows: Iterable[Row], over: FederatedData) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is not known.

    Beside each figure's mean stand its standard deviation and the half width of its
    95 % interval.

    Parameters
    ----------
    rows
        Of one table.
    over
        What its runs are over.
    """
    return [
        {
            "data": over.data,
            "partition": over.partition,
            "model": row.model,
            "label": row.label,
            "method": row.method,
            "setup": row.setup,
            "group": row.group,
            "runs": list(row.runs),
            **dict(_flat_figures(row.figures)),
            "num_clients": row.num_clients,
            "num_rounds": row.num_rounds,
            "seconds": row.seconds,
            "is_reference": row.is_reference,
        }
        for row in rows
    ]


def as_csv(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return what `as_documents` does, a column each; empty where there is none."""
    text = io.StringIO()
    documents = [{**one, "runs": " ".join(one["runs"])} for one in documents]
    fields = list(documents[0]) if documents else []
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(documents)
    return text.getvalue()


def as_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return a header and the rows as text; with the seeds where there are several."""
    several = any(len(row.runs) > 1 for row in rows)
    degraded = degraded_columns(rows)
    header = ["method", "group", "average", "bottom decile", *degraded]
    header += ["clients", *(["seeds"] if several else []), "rounds", "seconds"]
    return [header, *(_cells(row, degraded.values(), several) for row in rows)]


def degraded_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns of fractions degraded: the figure by what the table calls it.

    That against FedAvg is one where it says more than that against each run's own
    global model.
    """
    columns = {degraded_vs(VS_GLOBAL): "fraction_degraded"}
    if any(
        row.figures[VS_FEDAVG].mean not in (None, row.figures["fraction_degraded"].mean)
        for row in rows
    ):
        columns[degraded_vs(FEDAVG)] = VS_FEDAVG
    return columns


def percent(figure: Estimate) -> str:
    """Return a fraction in percent with its interval, as in ``79.9 ± 1.2 %``."""
    if figure.mean is None:
        return "-"
    mean = f"{100 * figure.mean:.1f}"
    if figure.half_width is None:
        return f"{mean} %"
    return f"{mean} ± {100 * figure.half_width:.1f} %"


def points(figure: Estimate) -> str:
    """Return a fraction in percent, as `percent` does, without the sign."""
    return percent(figure).removesuffix(" %")


def number(figure: Estimate) -> str:
    """Return a figure with its interval, as in ``1.178 ± 0.020``."""
    if figure.mean is None:
        return "-"
    if figure.half_width is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ± {figure.half_width:.3f}"


def seconds_of(row: Row) -> str:
    """Return the seconds of a row as text."""
    return "-" if row.seconds is None else f"{row.seconds:.1f}"


def _reference_labels(found: Sequence[tuple[_Model, Row]]) -> dict[_Model, str]:
    """Return what unpersonalised models are called, in all groups of clients alike.

    Where models of one title are not the same, it is told whose each is.
    """
    models: dict[str, set[_Model]] = defaultdict(set)
    for model, row in found:
        models[row.method].add(model)
    labels: dict[_Model, str] = {}
    for model, row in found:
        if row.is_reference:
            whose = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            labels.setdefault(model, row.label + whose)
    return labels


_Fedavg = Mapping[int | None, tuple[str, Mapping[str, float]]]
"""By seed the split, and the clients' accuracies with FedAvg's model."""


def _fedavg_of(setups: Sequence[Setup]) -> _Fedavg:
    """Return FedAvg's model of a table; nothing where there is none, or several."""
    whole = [setup for setup in setups if setup.title == FEDAVG]
    if len(setups) < 2 or len(whole) > 1:
        return {}
    if whole:
        return _accuracies(whole[0], lambda one: one.accuracy)
    found = {
        _reference_model(setup, FEDAVG): setup
        for setup in setups
        if setup.runs[0].reference_title == FEDAVG
    }
    if len(found) != 1:
        return {}
    return _accuracies(next(iter(found.values())), lambda one: one.accuracy_global)


def _accuracies(setup: Setup, of: Callable[[ClientRow], float]) -> _Fedavg:
    return {
        run.seed: (
            str(run.manifest.get("partition_hash")),
            {one.client: of(one) for one in clients_of(run.path)},
        )
        for run in setup.runs
        if has_clients(run.path)
    }


def _vs_fedavg(
    run: Run, group: str, fedavg: _Fedavg, *, is_reference: bool
) -> float | None:
    split, accuracies = fedavg.get(run.seed, ("", {}))
    if split != str(run.manifest.get("partition_hash")) or not has_clients(run.path):
        return None
    clients = [one for one in clients_of(run.path) if one.seen == (group == "seen")]
    if is_reference:
        clients = [replace(one, accuracy=one.accuracy_global) for one in clients]
    return fraction_degraded_against(clients, accuracies)


def _rows(setup: Setup, group: str, fedavg: _Fedavg) -> Iterator[tuple[_Model, Row]]:
    personal = [run.figures(group) for run in setup.runs]
    reference = [one["global"] for one in personal]
    if personal[0]["num_clients"] == 0:
        return
    title = setup.runs[0].reference_title
    if title is not None and _differ(personal, reference):
        row = _row(setup, title, group, reference, fedavg, is_reference=True)
        yield _reference_model(setup, title), row
    row = _row(setup, setup.title, group, personal, fedavg, is_reference=False)
    yield _own_model(setup), row


def _differ(
    personal: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> bool:
    return any(
        {key: value for key, value in one.items() if key != "global"} != other
        for one, other in zip(personal, reference, strict=True)
    )


def _row(
    setup: Setup,
    method: str,
    group: str,
    figures: Sequence[Mapping[str, Any]],
    fedavg: _Fedavg,
    *,
    is_reference: bool,
) -> Row:
    vs_fedavg = estimate(
        _vs_fedavg(run, group, fedavg, is_reference=is_reference) for run in setup.runs
    )
    seconds = (_seconds(run, with_hand_over=not is_reference) for run in setup.runs)
    return Row(
        label=method if is_reference else setup.label,
        method=method,
        setup=setup.label,
        group=group,
        runs=tuple(run.name for run in setup.runs),
        model=model_of(setup.runs[0]),
        figures={
            **_figures(figures, is_compared=setup.has_reference),
            VS_FEDAVG: vs_fedavg,
        },
        num_clients=figures[0]["num_clients"],
        num_rounds=setup.runs[0].results["training"].get("num_rounds"),
        seconds=estimate(seconds).mean,
        is_reference=is_reference,
    )


def _own_model(setup: Setup) -> _Model:
    """Return what the clients of a setup have at its end."""
    by_group = {group: [run.results[group] for run in setup.runs] for group in GROUPS}
    return _model(setup, setup.title, by_group)


def _reference_model(setup: Setup, title: str) -> _Model:
    """Return the unpersonalised model of a setup, called ``title``."""
    by_group = {
        group: [run.results[group]["global"] for run in setup.runs] for group in GROUPS
    }
    return _model(setup, title, by_group)


def _model(
    setup: Setup, title: str, by_group: Mapping[str, Sequence[Mapping[str, Any]]]
) -> _Model:
    return _Model(
        title,
        states=tuple(run.results["training"].get("state_sha256") for run in setup.runs),
        figures=tuple(
            tuple(one.get(name) for name in _TELLING)
            for by_seed in by_group.values()
            for one in by_seed
        ),
    )


def _figures(
    by_seed: Sequence[Mapping[str, Any]], *, is_compared: bool
) -> dict[str, Estimate]:
    """Return the figures of a row; without gain where there is no reference.

    Beside an unpersonalised model that means nothing, such as an untrained one, it
    would be a number without a meaning.
    """
    figures = {
        name: estimate(one.get(key) for one in by_seed) for name, key in FIGURES.items()
    }
    figures["gain"] = estimate(map(_gain, by_seed) if is_compared else ())
    return figures


def _gain(figures: Mapping[str, Any]) -> float | None:
    own, reference = (
        one.get(FIGURES["average"]) for one in (figures, figures.get("global", {}))
    )
    return None if own is None or reference is None else own - reference


def _seconds(run: Run, *, with_hand_over: bool) -> float | None:
    training = run.results["training"]
    seconds: float | None = training.get("seconds")
    if seconds is not None and with_hand_over:
        seconds += training.get("personalization_seconds", 0.0)
    return seconds


def _cells(row: Row, degraded: Iterable[str], several: bool) -> list[str]:
    return [
        row.label,
        row.group,
        percent(row.figures["average"]),
        percent(row.figures["bottom_decile"]),
        *(percent(row.figures[name]) for name in degraded),
        str(row.num_clients),
        *([str(len(row.runs))] if several else []),
        "-" if row.num_rounds is None else str(row.num_rounds),
        seconds_of(row),
    ]


def _flat_figures(
    figures: Mapping[str, Estimate],
) -> Iterator[tuple[str, float | None]]:
    for name, one in figures.items():
        yield name, one.mean
        yield f"{name}_std", one.std
        yield f"{name}_half_width", one.half_width
