"""The table of a batch: what finished runs say, mean and interval over the seeds.

A row is a point of a sweep, or a method of a comparison with what was chosen for it.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from knnper.errors import RunError
from knnper.metrics import ACCURACY, called
from knnper.server.results import OVER_CLIENTS, figure_of
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.grid import PointValues
from knnper.simulation.batches.points import (
    FIGURES,
    GLOBAL,
    figures_of_metric,
)
from knnper.simulation.batches.runner import Outcome, Plan
from knnper.simulation.batches.sweep import (
    Sweep,
    SweepSettings,
    variants_of,
)
from knnper.simulation.origin import code_of
from knnper.simulation.reports.accuracy_table import (
    VS_GLOBAL,
    degraded_vs,
)
from knnper.simulation.reports.client_table import (
    fraction_degraded_against,
    read_clients,
)
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.finished_run import (
    EVERYBODY,
    GROUPS,
    UNKNOWN,
    load_run,
)
from knnper.simulation.reports.provenance import FINGERPRINT, by_data, versions_text
from knnper.simulation.reports.table import Table, csv_text
from knnper.simulation.reports.terms import term_of
from knnper.simulation.reports.text import as_text

# Of a run, training and personalisation together.
SECONDS = "seconds"

# Of a client in a round: of the payload that it gets, of the update that it sends.
BYTES = ("bytes_down", "bytes_up")
_VS = "_vs_"
Figures = Mapping[str, float | None]  # by column; None where there is no such figure

# By one of `OVER_CLIENTS`, or the name of a figure of all clients together.
_WORDS = {
    "num_clients": "clients",
    "num_empty": "clients without test examples",
    "num_test_examples": "test examples",
    "weighted": "average",
    "mean": "mean over clients",
    "bottom_decile": "bottom decile",
    "worst": "worst client",
    "std": "spread over clients",
    "fraction_degraded": degraded_vs(VS_GLOBAL),
    "num_undefined": "clients where it is not defined",
    "ece": "calibration error",
    "log_loss": "log-loss",
}
_COUNTS = ("num_clients", "num_empty", "num_test_examples", "num_undefined")
_LOWER_IS_BETTER = ("std", "fraction_degraded", "num_undefined", "ece", "log_loss")


def all_columns(figures: Sequence[str] = FIGURES) -> tuple[str, ...]:
    """Return what there is of each run, as in ``unseen.global.accuracy_weighted``."""
    return tuple(
        f"{group}.{prefix}{figure}"
        for group in (*GROUPS, EVERYBODY)
        for prefix in ("", GLOBAL)
        for figure in figures
    )


def versus(figure: str, reference: str) -> str:
    """Return the name of a figure less the reference's with the same seed."""
    return f"{figure}{_VS}{reference}"


@dataclass(frozen=True)
class PointRow:
    """How a point did, over its seeds."""

    variant: str
    title: str
    values: PointValues
    num_runs: int  # seeds that have figures
    num_failed: int
    # By column. In a comparison the fraction degraded is against the reference row.
    estimates: Mapping[str, Estimate] = field(repr=False)
    # By seed: what the estimates are of.
    figures: Mapping[int, Figures] = field(default_factory=dict, repr=False)


def rows_of(plan: Plan, outcomes: Sequence[Outcome]) -> list[PointRow]:
    """Return a row for each outcome, in their order."""
    if isinstance(plan, Comparison):
        columns = list(compared_columns(plan).values())
    else:
        columns = [*all_columns(plan.figures), *(name for _, _, name in _gains(plan))]
    columns += [SECONDS, *BYTES]
    runs = {(one.point.variant, _place(plan, one)): one.runs for one in outcomes}
    rows = []
    for outcome in outcomes:
        place = _place(plan, outcome)
        bases = {name: runs.get((name, place), {}) for name in plan.references}
        figures = {
            seed: _figures(
                plan, run, {name: by[seed] for name, by in bases.items() if seed in by}
            )
            for seed, run in outcome.runs.items()
        }
        rows.append(
            PointRow(
                outcome.point.variant,
                outcome.point.title,
                outcome.point.values,
                len(outcome.runs),
                len(outcome.failures),
                {
                    name: estimate(one[name] for one in figures.values())
                    for name in columns
                },
                figures,
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


def _figures(plan: Plan, run: Path, bases: Mapping[str, Path]) -> Figures:
    """Return the figures of a run by column; ``bases`` are runs of the references."""
    own = _own_figures(plan, run)
    others = {name: _own_figures(plan, base) for name, base in bases.items()}
    gains = {
        name: _gain(own[column], others.get(reference, {}).get(column))
        for column, reference, name in _gains(plan)
    }
    degraded: Figures = {}
    if isinstance(plan, Comparison):
        degraded = _degraded(run, bases[plan.reference], plan.metric)
    return {**own, **gains, **degraded, **_costs(run)}


def _own_figures(plan: Plan, run: Path) -> Figures:
    if isinstance(plan, Sweep):
        return figures_of(run)
    results = RunFolder(run).results()
    figures = [figure_of(plan.metric, name) for name in ("weighted", "bottom_decile")]
    return {
        f"{group}.{one}": results[group][one] for group in GROUPS for one in figures
    }


def _gains(plan: Plan) -> list[tuple[str, str, str]]:
    """Return columns, each with a reference and the column of the difference to it."""
    columns = [f"{group}.{figure_of(plan.metric, 'weighted')}" for group in GROUPS]
    if isinstance(plan, Sweep):
        columns = [f"{group}.{plan.settings.y}" for group in (*GROUPS, EVERYBODY)]
    pairs = itertools.product(columns, plan.references)
    return [(column, name, versus(column, name)) for column, name in pairs]


def _gain(figure: float | None, base: float | None) -> float | None:
    return None if figure is None or base is None else figure - base


def _degraded(run: Path, base: Path, metric: str) -> Figures:
    reference, clients = _clients(base, metric), _clients(run, metric)
    values = dict(zip(reference["client"], reference["accuracy"], strict=True))
    return {
        f"{group}.{figure_of(metric, 'fraction_degraded')}": fraction_degraded_against(
            clients[clients["seen"] == (group == "seen")], values, metric
        )
        for group in GROUPS
    }


def _costs(run: Path) -> Figures:
    folder = RunFolder(run)
    training, rounds = folder.results()["training"], folder.rounds()
    replied = sum(one["num_clients"] for one in rounds)
    asked = replied + sum(one["num_failed"] for one in rounds)
    down, up = (sum(one[name] for one in rounds) for name in BYTES)
    return {
        SECONDS: training["seconds"] + training["personalization_seconds"],
        BYTES[0]: down / asked if asked else None,
        BYTES[1]: up / replied if replied else None,
    }


def compared_columns(plan: Comparison) -> dict[tuple[str, str], str]:
    """Return the columns of a comparison by group and name in its files."""
    average, bottom_decile, degraded = (
        figure_of(plan.metric, name)
        for name in ("weighted", "bottom_decile", "fraction_degraded")
    )
    named = {
        "average": average,
        **{f"vs_{name}": versus(average, name) for name in plan.references},
        "bottom_decile": bottom_decile,
        "fraction_degraded": degraded,
    }
    return {
        (group, name): f"{group}.{figure}"
        for group in GROUPS
        for name, figure in named.items()
    }


def _clients(path: Path, metric: str) -> pd.DataFrame:
    try:
        return read_clients(path, metric)
    except RunError as error:
        raise RunError(
            f"{error}. Delete {path}, and the same command makes the run anew"
        ) from error


def documents_of(
    plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[PointRow]
) -> list[dict[str, Any]]:
    """Return the rows as plain values, as ``--json`` prints them."""
    if not isinstance(plan, Comparison):
        documents = [asdict(row) for row in rows]
        for document in documents:
            del document["figures"]  # points.csv has those of each seed
        return documents
    columns = compared_columns(plan)
    return [
        {
            "name": row.variant,
            "title": row.title,
            **{
                group: {
                    name: asdict(row.estimates[column])
                    for (whose, name), column in columns.items()
                    if whose == group
                }
                for group in GROUPS
            },
            "chosen": dict(row.values),
            **_end(outcome, row),
        }
        for outcome, row in zip(outcomes, rows, strict=True)
    ]


def _end(outcome: Outcome, row: PointRow) -> dict[str, Any]:
    """Return what documents and lines of a comparison have after what was chosen."""
    scores = [one.score for one in outcome.tried if one.point is outcome.point]
    return {
        "validation": scores[0] if scores else None,
        **{name: row.estimates[name].mean for name in (SECONDS, *BYTES)},
        "num_failed": row.num_failed,
    }


def csv_of(plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[PointRow]) -> str:
    """Return every figure of each row, fractions of 1; empty where there is none."""
    lines = []
    for outcome, row in zip(outcomes, rows, strict=True):
        if isinstance(plan, Sweep):
            line = _swept_line(row, plan.settings)
        else:
            line = _compared_line(outcome, row, compared_columns(plan))
        lines.append({**line, **_origin(plan, outcome)})
    return csv_text(lines)


def _origin(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Return of what runs a row is, in columns that files of several batches share."""
    runs = [load_run(path) for path in outcome.runs.values()]
    if not runs:
        return {}
    first, (over, _) = runs[0], by_data(runs)[0]
    cores = first.manifest.get("num_cpus", "?")
    return {
        "batch": plan.name,
        "data": first.section("data").get("name", UNKNOWN),
        "partition": over.partition,
        "model": first.section("model").get("name", UNKNOWN),
        "method_name": first.results["method"],
        "personalization_name": first.results.get("personalization", ""),
        "seeds": " ".join(str(seed) for seed in outcome.runs),
        "splits": " ".join(run.split_hash[:FINGERPRINT] for run in runs),
        "code": "; ".join(sorted({code_of(run.path) for run in runs})),
        "hardware": f"{cores} CPU cores; {versions_text(first.manifest)}",
    }


def _swept_line(row: PointRow, settings: SweepSettings) -> dict[str, Any]:
    line = {
        "variant": row.variant,
        **{key: row.values[key] for key in settings.varied()},
    }
    line |= {"num_runs": row.num_runs, "num_failed": row.num_failed}
    for column, found in row.estimates.items():
        line |= found.flat(column, ".sd", ".half_width")
    return {**line, "title": row.title}


def _compared_line(
    outcome: Outcome, row: PointRow, columns: Mapping[tuple[str, str], str]
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
            **_run_of(outcome, seed),
            **(figures_of(outcome.runs[seed]) if seed in outcome.runs else {}),
        }
        for outcome in outcomes
        for seed in outcome.point.runs
    ]


def compared_run_rows(
    plan: Comparison, outcomes: Sequence[Outcome], rows: Sequence[PointRow]
) -> list[dict[str, Any]]:
    """Return every tested run of a comparison with its figures, as plain values."""
    columns = {
        f"{group}_{name}": column
        for (group, name), column in compared_columns(plan).items()
    }
    columns |= {name: name for name in (SECONDS, *BYTES)}
    return [
        {
            "row": row.variant,
            **_run_of(outcome, seed),
            **{
                name: row.figures[seed].get(column)
                for name, column in columns.items()
                if seed in row.figures
            },
        }
        for outcome, row in zip(outcomes, rows, strict=True)
        for seed in outcome.point.runs
    ]


def _run_of(outcome: Outcome, seed: int) -> dict[str, Any]:
    """Return which run a row of points.csv is of, and which code made it."""
    run = outcome.runs.get(seed)
    return {
        "seed": seed,
        "run": None if run is None else run.name,
        "failure": outcome.failures.get(seed),
        "code": None if run is None else code_of(run),
    }


def _spread(figure: str) -> tuple[str, str]:
    """Return metric and one of `_WORDS`, of a figure that `figure_of` named or not."""
    figure = figure.removeprefix(GLOBAL)
    for name in OVER_CLIENTS:
        if figure.endswith(f"_{name}"):
            return figure.removesuffix(f"_{name}"), name
    return ACCURACY, figure


def label_of(figure: str) -> str:
    """Return what people call a figure, as in ``global.accuracy_weighted``."""
    metric, name = _spread(figure)
    words = _WORDS[name]
    if metric != ACCURACY:
        words = f"{called(metric).title}, {words}"
    elif name == "weighted":
        words = ACCURACY
    return f"global model's {words}" if figure.startswith(GLOBAL) else words


def is_percent(figure: str) -> bool:
    """Return whether a figure is a fraction, which people read in percent."""
    metric, name = _spread(figure.partition(_VS)[0])
    if name in (*_COUNTS, "log_loss"):
        return False
    return called(metric).is_fraction or name == "fraction_degraded"


def lower_is_better(figure: str) -> bool:
    """Return whether the smallest value of a figure is the best."""
    metric, name = _spread(figure)
    return name in _LOWER_IS_BETTER or called(metric).lower_is_better


def column_of(settings: SweepSettings) -> str:
    """Return the column that a sweep shows and chooses by."""
    return f"{settings.group}.{settings.y}"


def table_of(plan: Plan, rows: Sequence[PointRow]) -> Table:
    """Return the table for people, fractions in percent."""
    if isinstance(plan, Sweep):
        return Table.of_cells(plan.name, _swept_cells(plan.settings, rows))
    titles = {row.variant: row.title for row in rows}
    references = [titles[name] for name in plan.references]
    of_group = [f"vs {title}" for title in references]
    of_group += ["bottom decile", degraded_vs(references[0])]
    named = "" if plan.metric == ACCURACY else f" {called(plan.metric).title}"
    header = ["method", f"seen{named}", *of_group, f"unseen{named}", *of_group]
    columns = compared_columns(plan).values()
    cells = [_compared_cells(row, columns) for row in rows]
    return Table.of_cells(plan.name, [[*header, "s a run"], *cells])


def _compared_cells(row: PointRow, columns: Iterable[str]) -> list[str]:
    cells = [f"{row.title}{_failed(row)}"]
    for column in columns:
        figure = column.partition(".")[2]
        cells.append(_spread_text(row.estimates[column], figure))
    seconds = row.estimates[SECONDS].mean
    return [*cells, "-" if seconds is None else f"{seconds:.1f}"]


def _spread_text(found: Estimate, figure: str) -> str:
    """Return mean and half of the 95 % interval; a gain with its sign."""
    sign = "+" if _VS in figure and (found.mean or 0.0) > 0 else ""
    half = "" if found.half_width is None else f" ± {_number(found.half_width, figure)}"
    return f"{sign}{_number(found.mean, figure)}{half}{found.mark}"


def _failed(row: PointRow) -> str:
    return f" ({row.num_failed} failed)" if row.num_failed else ""


def _swept_cells(settings: SweepSettings, rows: Sequence[PointRow]) -> list[list[str]]:
    metric, _ = _spread(settings.y)
    names = ("weighted", "bottom_decile", "fraction_degraded")
    average, *more = (figure_of(metric, name) for name in names)
    beside = [one for one in (GLOBAL + average, *more) if one != settings.y]
    variant = ["variant"] if settings.variants else []
    shown = [label_of(settings.y), "sd", "95 % interval"]
    variants = variants_of(settings)
    shown += [f"vs {variants[name].title or name}" for name in settings.references()]
    shown += map(label_of, beside)
    cells = [[*variant, *map(term_of, settings.varied()), *shown, "runs"]]
    column = column_of(settings)
    for row in rows:
        main = row.estimates[column]
        others = {one: row.estimates[f"{settings.group}.{one}"].mean for one in beside}
        cells.append(
            [
                *([row.title] if variant else []),
                *(as_text(row.values[key]) for key in settings.varied()),
                _number(main.mean, settings.y),
                _number(main.std, settings.y),
                _interval(main, settings.y),
                *(
                    _spread_text(
                        row.estimates[versus(column, name)], versus(settings.y, name)
                    )
                    for name in settings.references()
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
    return " to ".join(_number(end, figure) for end in (low, high)) + found.mark
