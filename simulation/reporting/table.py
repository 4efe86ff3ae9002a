"""How the runs did: a row a setup and group of clients, over the seeds."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulation.intervals import Estimate, estimate
from simulation.reporting.models import Model, own_model, reference_model
from simulation.reporting.runs import GROUPS, Run
from simulation.reporting.setups import Setup, setups_of

FIGURES: Mapping[str, str] = {
    "average": "accuracy_weighted",
    "mean": "accuracy_mean",
    "bottom_decile": "accuracy_bottom_decile",
    "worst": "accuracy_worst",
    "fraction_hurt": "fraction_hurt",
    "ece": "ece",
    "log_loss": "log_loss",
}
"""What a row calls the figures of `server.results.Summary`."""


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
    figures
        By the names of `FIGURES`, over the seeds; and ``gain``, by how much the average
        is above that of the unpersonalised model of the same run. It and the share of
        clients hurt have no value where that model means nothing.
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
    figures: Mapping[str, Estimate]
    num_clients: int
    num_rounds: int | None
    seconds: float | None
    is_reference: bool


def table_of(setups: Sequence[Setup]) -> list[Row]:
    """Return the rows of a table that compares setups: seen clients, then unseen.

    A setup gives one row a group, and one more for its unpersonalised model where that
    differs. Setups that trained the same global model share its row.
    """
    found = [one for group in GROUPS for setup in setups for one in _rows(setup, group)]
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


def as_documents(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is not known.

    Beside each figure's mean stand its standard deviation and the half width of its
    95 % interval.
    """
    return [
        {
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


def as_csv(rows: Iterable[Row]) -> str:
    """Return every figure, a column each; empty where there is none."""
    text = io.StringIO()
    documents = [{**one, "runs": " ".join(one["runs"])} for one in as_documents(rows)]
    fields = list(documents[0]) if documents else []
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(documents)
    return text.getvalue()


def as_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return a header and the rows as text; with the seeds where there are several."""
    several = any(len(row.runs) > 1 for row in rows)
    header = ["method", "group", "average", "bottom decile", "share hurt"]
    header += ["clients", *(["seeds"] if several else []), "rounds", "seconds"]
    return [header, *(_cells(row, several) for row in rows)]


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


def _reference_labels(found: Sequence[tuple[Model, Row]]) -> dict[Model, str]:
    """Return what unpersonalised models are called, in all groups of clients alike.

    Where models of one title are not the same, it is told whose each is.
    """
    models: dict[str, set[Model]] = defaultdict(set)
    for model, row in found:
        models[row.method].add(model)
    labels: dict[Model, str] = {}
    for model, row in found:
        if row.is_reference:
            whose = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            labels.setdefault(model, row.label + whose)
    return labels


def _rows(setup: Setup, group: str) -> Iterator[tuple[Model, Row]]:
    personal = [run.results[group] for run in setup.runs]
    reference = [one["global"] for one in personal]
    if personal[0]["num_clients"] == 0:
        return
    title = setup.runs[0].reference_title
    if title is not None and _differ(personal, reference):
        row = _row(setup, title, group, reference, is_reference=True)
        yield reference_model(setup, title), row
    row = _row(setup, setup.title, group, personal, is_reference=False)
    yield own_model(setup), row


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
    *,
    is_reference: bool,
) -> Row:
    seconds = (_seconds(run, with_hand_over=not is_reference) for run in setup.runs)
    return Row(
        label=method if is_reference else setup.label,
        method=method,
        setup=setup.label,
        group=group,
        runs=tuple(run.name for run in setup.runs),
        figures=_figures(figures, is_compared=setup.has_reference),
        num_clients=figures[0]["num_clients"],
        num_rounds=setup.runs[0].results["training"].get("num_rounds"),
        seconds=estimate(seconds).mean,
        is_reference=is_reference,
    )


def _figures(
    by_seed: Sequence[Mapping[str, Any]], *, is_compared: bool
) -> dict[str, Estimate]:
    """Return the figures of a row; without gain and hurt where there is no reference.

    Beside an unpersonalised model that means nothing, such as an untrained one, both
    would be numbers without a meaning.
    """
    figures = {
        name: estimate(one.get(key) for one in by_seed) for name, key in FIGURES.items()
    }
    figures["gain"] = estimate(map(_gain, by_seed))
    if not is_compared:
        figures |= dict.fromkeys(("fraction_hurt", "gain"), estimate(()))
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


def _cells(row: Row, several: bool) -> list[str]:
    return [
        row.label,
        row.group,
        percent(row.figures["average"]),
        percent(row.figures["bottom_decile"]),
        percent(row.figures["fraction_hurt"]),
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
