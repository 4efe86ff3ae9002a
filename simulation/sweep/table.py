"""The tables of a sweep: every run, and every point with its interval."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from simulation.intervals import Estimate
from simulation.showing import VS_GLOBAL, degraded_vs
from simulation.sweep.figures import COLUMNS, PointFigures, column_of
from simulation.sweep.settings import GLOBAL, SweepSettings
from simulation.sweep.terms import term_of

BESIDE = ("global.accuracy_weighted", "accuracy_bottom_decile", "fraction_degraded")
"""What a table for people shows beside the figure of the sweep."""

_WORDS = {
    "num_clients": "clients",
    "num_empty": "clients without test examples",
    "num_test_examples": "test examples",
    "accuracy_weighted": "accuracy",
    "accuracy_mean": "mean over clients",
    "accuracy_bottom_decile": "bottom decile",
    "accuracy_worst": "worst client",
    "accuracy_std": "spread over clients",
    "fraction_degraded": degraded_vs(VS_GLOBAL),
    "ece": "calibration error",
    "log_loss": "log-loss",
}
_NOT_IN_PERCENT = ("log_loss", "num_clients", "num_empty", "num_test_examples")


def label_of(figure: str) -> str:
    """Return what people call a figure, as in ``global.accuracy_weighted``."""
    words = _WORDS[figure.removeprefix(GLOBAL)]
    return f"global model's {words}" if figure.startswith(GLOBAL) else words


def is_percent(figure: str) -> bool:
    """Return whether a figure is a fraction, which people read in percent."""
    return figure.removeprefix(GLOBAL) not in _NOT_IN_PERCENT


def as_cells(rows: Sequence[PointFigures], settings: SweepSettings) -> list[list[str]]:
    """Return a header and a row for each point as text, fractions in percent."""
    beside = [figure for figure in BESIDE if figure != settings.y]
    variant = ["variant"] if settings.variants else []
    shown = [label_of(settings.y), "sd", "95 % interval", *map(label_of, beside)]
    header = [*variant, *map(term_of, settings.varied()), *shown, "runs"]
    return [header, *(_cells(row, settings, beside) for row in rows)]


def _cells(
    row: PointFigures, settings: SweepSettings, beside: Sequence[str]
) -> list[str]:
    name = [row.title] if settings.variants else []
    main = row.estimates[column_of(settings)]
    others = [
        _number(row.estimates[f"{settings.group}.{figure}"].mean, figure)
        for figure in beside
    ]
    failed = f" ({row.num_failed} failed)" if row.num_failed else ""
    return [
        *name,
        *(_value(row.values[key]) for key in settings.varied()),
        _number(main.mean, settings.y),
        _number(main.std, settings.y),
        _interval(main, settings.y),
        *others,
        f"{row.num_runs}{failed}",
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None, figure: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if is_percent(figure) else f"{value:.4g}"


def _interval(found: Estimate, figure: str) -> str:
    if found.mean is None or found.half_width is None:
        return "-"
    low, high = found.mean - found.half_width, found.mean + found.half_width
    if is_percent(figure):
        # Of few seeds it reaches beyond what a fraction can be.
        low, high = max(low, 0.0), min(high, 1.0)
    return " to ".join(_number(end, figure) for end in (low, high))


def as_csv(rows: Sequence[PointFigures], settings: SweepSettings) -> str:
    """Return every figure of each point, fractions of 1; empty where there is none.

    A column ``NAME.sd`` has the standard deviation over the seeds, and one
    ``NAME.half_width`` half of the 95 % interval.
    """
    return csv_text([_flat(row, settings) for row in rows])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns of the one that has most of them."""
    text = io.StringIO()
    header = max(rows, key=len)
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as one cell holds it: lists and mappings as JSON."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def _flat(row: PointFigures, settings: SweepSettings) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "variant": row.variant,
        **{key: row.values[key] for key in settings.varied()},
        "num_runs": row.num_runs,
        "num_failed": row.num_failed,
    }
    for column in COLUMNS:
        found = row.estimates[column]
        flat[column] = found.mean
        flat[f"{column}.sd"] = found.std
        flat[f"{column}.half_width"] = found.half_width
    return flat
