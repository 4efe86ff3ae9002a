"""The table of a batch: what finished runs say, mean and interval over the seeds.

A row is a point of a sweep, or a method of a comparison with what was chosen for it.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from knnper.errors import RunError
from knnper.metrics import ACCURACY, called
from knnper.server.results import OVER_CLIENTS, figure_of
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.plan import (
    FIGURES,
    GLOBAL,
    Comparison,
    Plan,
    PointsValues,
    Sweep,
    SweepSettings,
    figures_of_metric,
    term_of,
    variants_of,
)
from knnper.simulation.batches.runner import Outcome
from knnper.simulation.reports.runs import (
    EVERYBODY,
    GROUPS,
    VS_GLOBAL,
    ClientRow,
    Estimate,
    Table,
    as_text,
    clients_of,
    csv_text,
    degraded_vs,
    estimate,
    fraction_degraded_against,
    load_run,
)


def all_columns(figures: Sequence[str] = FIGURES) -> tuple[str, ...]:
    """Return what there is of each run, as in ``unseen.global.accuracy_weighted``."""
    return tuple(
        f"{group}.{prefix}{figure}"
        for group in (*GROUPS, EVERYBODY)
        for prefix in ("", GLOBAL)
        for figure in figures
    )


# The column of a comparison's run, training and personalisation together.
SECONDS = "seconds"
GAIN = "gain"  # over the reference with the same seed, and so the same split
Figures = Mapping[str, float | None]  # by column; None where there is no such figure


@dataclass(frozen=True)
class Row:
    """How a point did, over its seeds."""

    variant: str
    title: str
    values: PointsValues
    num_runs: int  # seeds that have figures
    num_failed: int
    # By column. In a comparison the fraction degraded is against the reference row.
    estimates: Mapping[str, Estimate] = field(repr=False)


def rows_of(plan: Plan, outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each outcome, in their order."""
    assert isinstance(plan, Comparison | Sweep), "there are no others"
    columns: Sequence[str] = all_columns(plan.figures)
    if isinstance(plan, Comparison):
        columns = (*compared_columns(plan.metric).values(), SECONDS)
    elif plan.reference is not None:
        columns = (*columns, GAIN)
    bases = {
        _place(plan, one): one.runs
        for one in outcomes
        if one.point.variant == plan.reference
    }
    rows = []
    for outcome in outcomes:
        base = bases.get(_place(plan, outcome), {})
        figures = [
            _compared_figures(run, base[seed], plan.metric)
            if isinstance(plan, Comparison)
            else _swept_figures(run, base.get(seed), column_of(plan.settings))
            for seed, run in outcome.runs.items()
        ]
        rows.append(
            Row(
                outcome.point.variant,
                outcome.point.title,
                outcome.point.values,
                len(outcome.runs),
                len(outcome.failures),
                {name: estimate(one[name] for one in figures) for name in columns},
            )
        )
    return rows


def _place(plan: Plan, outcome: Outcome) -> str:
    """Return what a row and its reference have in common, but for the seed."""
    # What is chosen for the rows of a comparison differs.
    return json.dumps(dict(outcome.point.values)) if isinstance(plan, Sweep) else ""


def figures_of(run: Path) -> Figures:
    """Return the figures of a finished run by column, fractions of 1."""
    found = load_run(run)
    figures = (*FIGURES, *itertools.chain(*map(figures_of_metric, found.metrics)))
    return {
        f"{group}.{prefix}{figure}": document.get(figure)
        for group in (*GROUPS, EVERYBODY)
        for own in (found.figures(group),)
        for prefix, document in (("", own), (GLOBAL, own["global"]))
        for figure in figures
    }


def _swept_figures(run: Path, base: Path | None, column: str) -> Figures:
    figures, others = figures_of(run), {} if base is None else figures_of(base)
    return {**figures, GAIN: _gain(figures[column], others.get(column))}


def _gain(figure: float | None, base: float | None) -> float | None:
    return None if figure is None or base is None else figure - base


# By their names in the files of a comparison, the figures of a metric that it shows.
_COMPARED = {
    "average": "weighted",
    "gain": f"weighted_{GAIN}",
    "bottom_decile": "bottom_decile",
    "fraction_degraded": "fraction_degraded",
}


def compared_columns(metric: str) -> dict[tuple[str, str], str]:
    """Return the columns of a comparison by group and name in its files."""
    return {
        (group, name): f"{group}.{figure_of(metric, figure)}"
        for group in GROUPS
        for name, figure in _COMPARED.items()
    }


def _compared_figures(run: Path, base: Path, metric: str) -> Figures:
    results, clients = RunFolder(run).results(), _clients(run, metric)
    reference = RunFolder(base).results()
    by_client = {one.client: one.accuracy for one in _clients(base, metric)}
    figures: dict[str, float | None] = {}
    for (group, name), column in compared_columns(metric).items():
        if name == "fraction_degraded":
            of_group = [one for one in clients if one.seen == (group == "seen")]
            figures[column] = fraction_degraded_against(of_group, by_client, metric)
        elif name == "gain":
            average = figure_of(metric, _COMPARED["average"])
            of_both = (one[group][average] for one in (results, reference))
            figures[column] = _gain(*of_both)
        else:
            figures[column] = results[group][column.removeprefix(f"{group}.")]
    training = results["training"]
    figures[SECONDS] = training["seconds"] + training["personalization_seconds"]
    return figures


def _clients(path: Path, metric: str) -> list[ClientRow]:
    try:
        return clients_of(path, metric)
    except RunError as error:
        raise RunError(
            f"{error}. Delete {path}, and the same command makes the run anew"
        ) from error


def documents_of(
    plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Return the rows as plain values, as ``--json`` prints them."""
    if not isinstance(plan, Comparison):
        return [asdict(row) for row in rows]
    columns = compared_columns(plan.metric)
    return [
        {
            "name": row.variant,
            "title": row.title,
            **{
                group: {
                    name: asdict(row.estimates[columns[group, name]])
                    for name in _COMPARED
                }
                for group in GROUPS
            },
            "chosen": dict(row.values),
            **_end(outcome, row),
        }
        for outcome, row in zip(outcomes, rows, strict=True)
    ]


def _end(outcome: Outcome, row: Row) -> dict[str, Any]:
    """Return what documents and lines of a comparison have after what was chosen."""
    scores = [one.score for one in outcome.tried if one.point is outcome.point]
    return {
        "validation": scores[0] if scores else None,
        "seconds": row.estimates[SECONDS].mean,
        "num_failed": row.num_failed,
    }


def csv_of(plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> str:
    """Return every figure of each row, fractions of 1; empty where there is none."""
    if isinstance(plan, Sweep):
        return csv_text([_swept_line(row, plan.settings) for row in rows])
    columns = compared_columns(plan.metric)
    lines = zip(outcomes, rows, strict=True)
    return csv_text([_compared_line(outcome, row, columns) for outcome, row in lines])


def _swept_line(row: Row, settings: SweepSettings) -> dict[str, Any]:
    line = {
        "variant": row.variant,
        **{key: row.values[key] for key in settings.varied()},
    }
    line |= {"num_runs": row.num_runs, "num_failed": row.num_failed}
    for column, found in row.estimates.items():
        line |= found.flat(column, ".sd", ".half_width")
    return line


def _compared_line(
    outcome: Outcome, row: Row, columns: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row.variant, "method": row.title}
    for (group, name), column in columns.items():
        line |= row.estimates[column].flat(f"{group}_{name}")
    end, chosen = _end(outcome, row), json.dumps(dict(row.values))
    return {**line, "validation": end["validation"], "chosen": chosen, **end}


def run_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return every run of a sweep with all its figures, as plain values."""
    return [
        {
            "variant": outcome.point.variant,
            **outcome.point.values,
            "seed": seed,
            "run": outcome.runs[seed].name if seed in outcome.runs else None,
            "failure": outcome.failures.get(seed),
            **(figures_of(outcome.runs[seed]) if seed in outcome.runs else {}),
        }
        for outcome in outcomes
        for seed in outcome.point.runs
    ]


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


_LOWER_IS_BETTER = ("accuracy_std", "fraction_degraded", "ece", "log_loss")
_WORDS_OVER_CLIENTS = {
    "weighted": "average",
    "mean": "mean over clients",
    "bottom_decile": "bottom decile",
    "worst": "worst client",
    "std": "spread over clients",
    "fraction_degraded": degraded_vs(VS_GLOBAL),
    "num_undefined": "clients where it is not defined",
}


def _spread(figure: str) -> tuple[str, str]:
    """Return metric and one of `OVER_CLIENTS`, of a figure that `figure_of` named."""
    figure = figure.removeprefix(GLOBAL)
    for name in OVER_CLIENTS:
        if figure.endswith(f"_{name}"):
            return figure.removesuffix(f"_{name}"), name
    return ACCURACY, figure


def label_of(figure: str) -> str:
    """Return what people call a figure, as in ``global.accuracy_weighted``."""
    words = _WORDS.get(figure.removeprefix(GLOBAL))
    if words is None:
        metric, name = _spread(figure)
        words = f"{called(metric).title}, {_WORDS_OVER_CLIENTS[name]}"
    return f"global model's {words}" if figure.startswith(GLOBAL) else words


def is_percent(figure: str) -> bool:
    """Return whether a figure is a fraction, which people read in percent."""
    figure = figure.removesuffix(f"_{GAIN}")
    if (plain := figure.removeprefix(GLOBAL)) in _WORDS:
        return plain not in _NOT_IN_PERCENT
    metric, name = _spread(figure)
    of_metric = called(metric).is_fraction and name != "num_undefined"
    return of_metric or name == "fraction_degraded"


def lower_is_better(figure: str) -> bool:
    """Return whether the smallest value of a figure is the best."""
    if (plain := figure.removeprefix(GLOBAL)) in _WORDS:
        return plain in _LOWER_IS_BETTER
    metric, name = _spread(figure)
    is_count = name in ("std", "fraction_degraded", "num_undefined")
    return is_count or called(metric).lower_is_better


def column_of(settings: SweepSettings) -> str:
    """Return the column that a sweep shows and chooses by."""
    return f"{settings.group}.{settings.y}"


def table_of(plan: Plan, rows: Sequence[Row]) -> Table:
    """Return the table for people, fractions in percent."""
    if isinstance(plan, Sweep):
        return Table.of_cells(plan.name, _swept_cells(plan.settings, rows))
    titles = {row.variant: row.title for row in rows}
    reference = titles[plan.reference] if isinstance(plan, Comparison) else VS_GLOBAL
    of_group = (f"vs {reference}", "bottom decile", degraded_vs(reference))
    named = "" if plan.metric == ACCURACY else f" {called(plan.metric).title}"
    header = ["method", f"seen{named}", *of_group, f"unseen{named}", *of_group]
    columns = compared_columns(plan.metric).values()
    cells = [_compared_cells(row, columns) for row in rows]
    return Table.of_cells(plan.name, [[*header, "s a run"], *cells])


def _compared_cells(row: Row, columns: Iterable[str]) -> list[str]:
    cells = [f"{row.title}{_failed(row)}"]
    for column in columns:
        figure = column.partition(".")[2]
        cells.append(_spread_text(row.estimates[column], figure))
    seconds = row.estimates[SECONDS].mean
    return [*cells, "-" if seconds is None else f"{seconds:.1f}"]


def _spread_text(found: Estimate, figure: str) -> str:
    """Return mean and half of the 95 % interval; a gain with its sign."""
    sign = "+" if figure.endswith(GAIN) and (found.mean or 0.0) > 0 else ""
    half = "" if found.half_width is None else f" ± {_number(found.half_width, figure)}"
    return f"{sign}{_number(found.mean, figure)}{half}"


def _failed(row: Row) -> str:
    return f" ({row.num_failed} failed)" if row.num_failed else ""


def _swept_cells(settings: SweepSettings, rows: Sequence[Row]) -> list[list[str]]:
    metric, _ = _spread(settings.y)
    names = ("weighted", "bottom_decile", "fraction_degraded")
    average, *more = (figure_of(metric, name) for name in names)
    beside = [one for one in (GLOBAL + average, *more) if one != settings.y]
    variant = ["variant"] if settings.variants else []
    shown = [label_of(settings.y), "sd", "95 % interval"]
    if settings.reference is not None:
        title = variants_of(settings)[settings.reference].title
        shown.append(f"vs {title or settings.reference}")
    shown += map(label_of, beside)
    cells = [[*variant, *map(term_of, settings.varied()), *shown, "runs"]]
    for row in rows:
        main = row.estimates[column_of(settings)]
        others = {one: row.estimates[f"{settings.group}.{one}"].mean for one in beside}
        cells.append(
            [
                *([row.title] if variant else []),
                *(as_text(row.values[key]) for key in settings.varied()),
                _number(main.mean, settings.y),
                _number(main.std, settings.y),
                _interval(main, settings.y),
                *(
                    [_spread_text(row.estimates[GAIN], f"{settings.y}_{GAIN}")]
                    if settings.reference is not None
                    else []
                ),
                *(_number(mean, figure) for figure, mean in others.items()),
                f"{row.num_runs}{_failed(row)}",
            ]
        )
    return cells


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
