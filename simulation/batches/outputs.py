"""What a batch leaves beside its runs: tables, a plot, and the choice of the best."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_jsonable_python

from knnper.errors import RunError
from knnper.experiment import dump_yaml, parse_overrides
from knnper.files import write_atomically
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import FAILED
from knnper.simulation.batches.folder import TABLE
from knnper.simulation.batches.runner import Outcome, Plan, failure_remark, folder_of
from knnper.simulation.batches.sweep import (
    ALONE,
    VARIANT,
    Sweep,
    SweepSettings,
    VariantSettings,
    variants_of,
)
from knnper.simulation.batches.tables import (
    PointRow,
    column_of,
    compared_run_rows,
    csv_of,
    is_percent,
    label_of,
    lower_is_better,
    run_rows,
    table_of,
)
from knnper.simulation.origin import older_code
from knnper.simulation.reports.estimate import WEAK_NOTE
from knnper.simulation.reports.figure import (
    SERIES,
    accuracy_axis,
    colors_of,
    styled,
    write_pictures,
)
from knnper.simulation.reports.finished_run import GROUPS
from knnper.simulation.reports.table import Chart, Shown, csv_text
from knnper.simulation.reports.terms import term_of
from knnper.simulation.reports.text import as_text, chart_text

_SIZE_INCHES = (7.2, 4.2)

# From this ratio of the largest to the smallest value on, the axis is logarithmic.
_ORDERS_FOR_LOG = 100
_LEAST_GAP = 0.04  # of the axis, between two values that are both named
_MARGIN = 0.02
_MARKERS = "os^Dv"
_DASHES = ("-", "--", ":", "-.")

# Sections of a variant that stand in place of the base's, even if they are empty.
_REPLACED = ("method", "personalization")
_LEAST_SEEDS = 3  # from which an interval can be told
PLOT = "plot"
CHOSEN = "chosen.yaml"


def plot_of(rows: Sequence[PointRow], settings: SweepSettings) -> Figure | None:
    """Return the plot that a sweep asks for; None without ``x`` or any figure."""
    column = column_of(settings)
    rows = [row for row in rows if row.estimates[column].mean is not None]
    if settings.x is None or not rows:
        return None
    return _plot(rows, settings, settings.x)


@styled
def _plot(rows: Sequence[PointRow], settings: SweepSettings, key: str) -> Figure:
    figure = Figure(_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    values = [_at(row, key) for row in rows]
    is_joined = settings.random is None and all(map(_is_number, values))
    places = _places(values, axes)
    curves: dict[tuple[str, ...], list[tuple[float, PointRow]]] = {}
    for row, value in zip(rows, values, strict=True):
        curve = tuple(as_text(_at(row, key)) for key in settings.curve_keys())
        curves.setdefault(curve, []).append((places[as_text(value)], row))
    names = list(dict.fromkeys(curve[:1] for curve in curves))
    others = list(dict.fromkeys(curve[1:] for curve in curves))
    colors = colors_of(", ".join(name) for name in names)
    for curve, points in curves.items():
        number = names.index(curve[:1])
        dashes = _DASHES[others.index(curve[1:]) % len(_DASHES)]
        points.sort(key=lambda one: one[0])
        found = [row.estimates[column_of(settings)] for _, row in points]
        axes.errorbar(
            [place for place, _ in points],
            [one.mean or 0.0 for one in found],
            yerr=[one.half_width or 0.0 for one in found],
            markersize=4,
            capsize=3,
            label=chart_text(", ".join(curve)),
            color=colors[number].light,
            marker=_MARKERS[number // len(SERIES) % len(_MARKERS)],
            linestyle=dashes if is_joined else "none",
        )
    axes.set_xlabel(chart_text(term_of(key)))
    if settings.series:
        # Beside the curves, which may be many.
        title = ",\n".join(chart_text(term_of(key)) for key in settings.curve_keys())
        figure.legend(title=title, loc="outside right upper", fontsize="small")
    label = f"{label_of(settings.y)}, {settings.group} clients"
    if is_percent(settings.y):
        accuracy_axis(axes, label)
        # Intervals of few seeds may reach beyond; the dots at the ends are shown whole.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_MARGIN), min(high, 1 + _MARGIN))
    else:
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    return figure


def _at(row: PointRow, key: str) -> Any:
    return row.title if key == VARIANT else row.values[key]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _places(values: Sequence[Any], axes: Axes) -> dict[str, float]:
    """Return where on the horizontal axis each value is; set the axis up for it."""
    if not all(map(_is_number, values)):
        names = list(dict.fromkeys(map(as_text, values)))
        shown = list(map(chart_text, names))
        axes.set_xticks(range(len(names)), shown, rotation=30, ha="right")
        return {name: float(place) for place, name in enumerate(names)}
    is_log = min(values) > 0 and max(values) >= _ORDERS_FOR_LOG * min(values)
    if is_log:
        axes.set_xscale("log")
    # Each value is named where they are far enough apart.
    named = np.unique(values)
    gaps = np.diff(np.log(named) if is_log else named)
    if len(gaps) and gaps.min() >= _LEAST_GAP * gaps.sum():
        axes.set_xticks(named, [f"{value:g}" for value in named])
        axes.minorticks_off()
    return {as_text(value): float(value) for value in values}


def best_points(sweep: Sweep, rows: Sequence[PointRow]) -> list[PointRow]:
    """Return the best point of each variant, of equal ones the first."""
    column, num_seeds = column_of(sweep.settings), len(sweep.seeds)
    is_loss = lower_is_better(sweep.settings.y)
    best = []
    for name in variants_of(sweep.settings):
        # The mean over fewer seeds is not to be compared.
        complete = [
            row
            for row in rows
            if row.variant == name and row.estimates[column].count == num_seeds
        ]
        if not complete:
            raise RunError(
                f"no point of the variant {name} has the figure {column} with every "
                "seed; choose by another y or group, or change the values that diverge"
            )
        # The first of equal ones: both keep it.
        choose = min if is_loss else max
        best.append(choose(complete, key=lambda row: row.estimates[column].mean or 0.0))
    return best


def chosen_sweep(sweep: Sweep, best: Sequence[PointRow]) -> str:
    """Return the file of a sweep that tests the best points, each once a seed."""
    settings = sweep.settings
    variants = variants_of(settings)
    chosen = {
        "chosen" if one.variant == ALONE else one.variant: _fixed(
            variants[one.variant], sweep.overrides, one.values
        )
        for one in best
    }
    base = {key: value for key, value in sweep.shared.items() if key != "name"}
    code = next(filter(None, (run.own_code for run in sweep.experiments)), None)
    if code is not None:  # which is not beside the file that is written
        base["own_code"] = code
    document = {
        "name": f"{settings.name}-chosen",
        "evaluate_on": "test",
        "seeds": list(settings.seeds),
        "y": settings.y,
        "group": settings.group,
        **({"x": VARIANT} if len(chosen) > 1 else {}),
        "set": dict(settings.set),
        "base": base,
        "variants": chosen,
    }
    return f"# What {settings.name} chose on validation data.\n{dump_yaml(document)}"


def _fixed(
    variant: VariantSettings, overrides: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    changed = {".".join(one.path): one.value for one in parse_overrides(overrides, [])}
    plain: dict[str, Any] = to_jsonable_python(variant)
    plain["set"] = {**variant.set, **changed, **values}
    return {
        key: value
        for key, value in plain.items()
        if value is not None and (value or key in _REPLACED)
    }


def write_batch(
    plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[PointRow], folder: Path
) -> Shown:
    """Write what a batch leaves beside its runs, and return what there is to show."""
    for name in (CHOSEN, *(f"{PLOT}.{ending}" for ending in ("svg", "pdf", "png"))):
        # What an earlier state of a sweep left and this one may not write.
        (folder / name).unlink(missing_ok=True)
    table, spread = table_of(plan, rows), list(_spread_remark(plan, rows))
    below = "".join(f"\n{line}\n" for line in spread)
    write_atomically(folder / TABLE, table.as_markdown() + below)
    write_atomically(folder / "table.csv", csv_of(plan, outcomes, rows))
    if isinstance(plan, Sweep):
        points = run_rows(outcomes)
    else:
        points = compared_run_rows(plan, outcomes, rows)
    write_atomically(folder / "points.csv", csv_text(points))
    charts = _write_plot(plan, rows, folder)
    chosen = _write_choice(plan, rows, folder)
    tuning = [one.point.tuning for outcome in outcomes for one in outcome.tried]
    runs = {
        *(folder_of(one, folder) for one in tuning if one is not None),
        *(run for outcome in outcomes for run in outcome.runs.values()),
    }
    failures = _failures(plan, outcomes, folder)
    remarks = (*spread, *failures, *older_code(runs, folder), *chosen)
    return Shown((table,), charts, remarks)


def _spread_remark(plan: Plan, rows: Sequence[PointRow]) -> Iterator[str]:
    """Yield what stands after ± in the table, where it stands anywhere."""
    columns = [f"{group}.accuracy_weighted" for group in GROUPS]
    figures = [row.estimates[column] for row in rows for column in columns]
    if any(figure.mark for row in rows for figure in row.estimates.values()):
        yield WEAK_NOTE
    if isinstance(plan, Comparison) and any(one.std is not None for one in figures):
        yield (
            f"In the comparison's table ± is half of the 95 % interval over "
            f"{len(plan.seeds)} seeds; table.csv has the standard deviations too"
        )


def _failures(plan: Plan, outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    """Yield what to tell of the runs that failed."""
    tried = [one for outcome in outcomes for one in outcome.tried]
    failed = [one for one in tried if one.failure is not None]
    if failed:
        yield (
            f"{len(failed)} of {len(tried)} candidates failed on validation data and "
            f"were not chosen; {FAILED} in the folder of each run says why. To make "
            "one again, delete its folder"
        )
    for outcome in outcomes:
        point, is_sweep = outcome.point, isinstance(plan, Sweep)
        what = f"{point.variant} {dict(point.values)}" if is_sweep else point.title
        for seed, reason in outcome.failures.items():
            run = folder_of(point.runs[seed], folder)
            yield failure_remark(what, seed, reason, run)


def _write_plot(
    plan: Plan, rows: Sequence[PointRow], folder: Path
) -> tuple[Chart, ...]:
    if not isinstance(plan, Sweep):
        return ()
    settings = plan.settings
    figure = plot_of(rows, settings)
    if figure is None:
        return ()
    write_pictures(folder, PLOT, figure)
    label, key = label_of(settings.y), term_of(settings.x or "")
    title = (
        f"{label[0].upper()}{label[1:]} of {settings.group} clients by {key}; "
        "bars are 95 % intervals over the seeds"
    )
    return (Chart(PLOT, title, lambda: figure),)


def _write_choice(plan: Plan, rows: Sequence[PointRow], folder: Path) -> list[str]:
    """Write the sweep that tests the best points; return what they are."""
    if not isinstance(plan, Sweep) or plan.settings.evaluate_on != "validation":
        return []
    best = best_points(plan, rows)
    path = folder / CHOSEN
    write_atomically(path, chosen_sweep(plan, best))
    of_what = [f" of {one.variant}" if plan.settings.variants else "" for one in best]
    # Seeds that nothing was chosen with.
    unused = (seed for seed in itertools.count() if seed not in plan.seeds)
    seeds = list(itertools.islice(unused, max(_LEAST_SEEDS, len(plan.seeds))))
    return [
        *(
            f"best{of_variant} on validation data: {dict(one.values)}"
            for of_variant, one in zip(of_what, best, strict=True)
        ),
        f"To test it, once: knnper sweep {shlex.quote(str(path))} --set "
        f"'seeds={seeds}'",
    ]
