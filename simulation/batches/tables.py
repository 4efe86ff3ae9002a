"""The tables of a batch: mean and interval over the seeds for each tested point.

A row is a point of a sweep, or a method of a comparison with its chosen settings.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from knnper.errors import RunError
from knnper.metrics import ACCURACY, called
from knnper.server.results import figure_of
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.figure_names import (
    BYTES,
    SECONDS,
    all_columns,
    is_difference,
    is_percent,
    label_of,
    metric_of,
    versus,
)
from knnper.simulation.batches.grid import PointValues
from knnper.simulation.batches.points import FIGURES, GLOBAL, figures_of_metric
from knnper.simulation.batches.runner import Outcome, Plan
from knnper.simulation.batches.sweep import Sweep, SweepSettings, variants_of
from knnper.simulation.origin import code_of
from knnper.simulation.reports.accuracy_table import degraded_vs
from knnper.simulation.reports.client_table import (
    fraction_degraded_against,
    read_clients,
)
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.finished_run import EVERYBODY, GROUPS, UNKNOWN, load_run
from knnper.simulation.reports.provenance import FINGERPRINT, by_data, versions_text
from knnper.simulation.reports.table import Table, csv_text
from knnper.simulation.reports.text import as_text, term_of

Figures = Mapping[str, float | None]  # by column; None where a run lacks the figure


@dataclass(frozen=True)
class PointRow:
    """The results of a point over its seeds.

    Attributes
    ----------
    num_runs
        Seeds that have results.
    estimates
        By column. In a comparison the fraction degraded is against the reference row.
    figures
        The figures that the estimates are computed from, by seed.
    """

    variant: str
    title: str
    values: PointValues
    num_runs: int
    num_failed: int
    estimates: Mapping[str, Estimate] = field(repr=False)
    figures: Mapping[int, Figures] = field(default_factory=dict, repr=False)


def rows_of(plan: Plan, outcomes: Sequence[Outcome]) -> list[PointRow]:
    """Return a row for each outcome, in their order."""
    if isinstance(plan, Comparison):
        columns = list(compared_columns(plan).values())
    else:
        differences = [name for _, _, name in _differences(plan)]
        columns = [*all_columns(plan.figures), *differences]
    columns += [SECONDS, *BYTES]
    runs = {
        (outcome.point.variant, _values_key(plan, outcome)): outcome.runs
        for outcome in outcomes
    }
    rows = []
    for outcome in outcomes:
        key = _values_key(plan, outcome)
        references = {name: runs.get((name, key), {}) for name in plan.references}
        figures = {
            seed: _figures_of_run(
                plan,
                run,
                {name: of[seed] for name, of in references.items() if seed in of},
            )
            for seed, run in outcome.runs.items()
        }
        rows.append(
            PointRow(
                variant=outcome.point.variant,
                title=outcome.point.title,
                values=outcome.point.values,
                num_runs=len(outcome.runs),
                num_failed=len(outcome.failures),
                estimates={
                    column: estimate(of_seed[column] for of_seed in figures.values())
                    for column in columns
                },
                figures=figures,
            )
        )
    return rows


def _values_key(plan: Plan, outcome: Outcome) -> str:
    """Return a text that is equal for points that are compared with each other."""
    # The rows of a comparison are compared whatever was chosen for them.
    return json.dumps(dict(outcome.point.values)) if isinstance(plan, Sweep) else ""


def figures_of(run: Path) -> Figures:
    """Return the figures of a finished run by column, fractions of 1."""
    finished = load_run(run)
    names = [*FIGURES]
    for metric in finished.metrics:
        names += figures_of_metric(metric)
    figures: dict[str, float | None] = {}
    for group in (*GROUPS, EVERYBODY):
        of_group = finished.figures(group)
        for prefix, document in (("", of_group), (GLOBAL, of_group["global"])):
            figures |= {f"{group}.{prefix}{name}": document.get(name) for name in names}
    return figures


def _figures_of_run(
    plan: Plan, run: Path, references: Mapping[str, Path]
) -> Mapping[str, float | None]:
    """Return the figures of a run by column, with differences to the references."""
    shown = _shown_figures(plan, run)
    others = {name: _shown_figures(plan, other) for name, other in references.items()}
    differences = {
        name: _subtract(shown[column], others.get(reference, {}).get(column))
        for column, reference, name in _differences(plan)
    }
    degraded: Figures = {}
    if isinstance(plan, Comparison):
        degraded = _fractions_degraded(run, references[plan.reference], plan.metric)
    return {**shown, **differences, **degraded, **_costs_of(run)}


def _shown_figures(plan: Plan, run: Path) -> Figures:
    if isinstance(plan, Sweep):
        return figures_of(run)
    results = RunFolder(run).results()
    names = [figure_of(plan.metric, name) for name in ("weighted", "bottom_decile")]
    return {
        f"{group}.{name}": results[group][name] for group in GROUPS for name in names
    }


def _differences(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the differences to references: column, reference and column of both."""
    columns = [f"{group}.{figure_of(plan.metric, 'weighted')}" for group in GROUPS]
    if isinstance(plan, Sweep):
        columns = [f"{group}.{plan.settings.y}" for group in (*GROUPS, EVERYBODY)]
    return [
        (column, reference, versus(column, reference))
        for column in columns
        for reference in plan.references
    ]


def _subtract(figure: float | None, reference: float | None) -> float | None:
    return None if figure is None or reference is None else figure - reference


def _fractions_degraded(run: Path, reference: Path, metric: str) -> Figures:
    """Return the fraction of each group's clients with a worse metric."""
    clients, others = _clients_of(run, metric), _clients_of(reference, metric)
    values = dict(zip(others["client"], others["accuracy"], strict=True))
    name = figure_of(metric, "fraction_degraded")
    return {
        f"{group}.{name}": fraction_degraded_against(
            clients[clients["seen"] == (group == "seen")], values, metric
        )
        for group in GROUPS
    }


def _clients_of(run: Path, metric: str) -> pd.DataFrame:
    try:
        return read_clients(run, metric)
    except RunError as error:
        raise RunError(
            f"{error}. Delete {run}, and the same command makes the run again"
        ) from error


def _costs_of(run: Path) -> Figures:
    """Return seconds, and a client's bytes in a round."""
    folder = RunFolder(run)
    training = folder.results()["training"]
    rounds = folder.rounds()
    num_replies = sum(record["num_clients"] for record in rounds)
    num_requests = num_replies + sum(record["num_failed"] for record in rounds)
    down, up = (sum(record[name] for record in rounds) for name in BYTES)
    return {
        SECONDS: training["seconds"] + training["personalization_seconds"],
        BYTES[0]: down / num_requests if num_requests else None,
        BYTES[1]: up / num_replies if num_replies else None,
    }


def compared_columns(plan: Comparison) -> dict[tuple[str, str], str]:
    """Return the columns of a comparison by group and by their name in its files."""
    average, bottom_decile, degraded = (
        figure_of(plan.metric, name)
        for name in ("weighted", "bottom_decile", "fraction_degraded")
    )
    names = {
        "average": average,
        **{f"vs_{name}": versus(average, name) for name in plan.references},
        "bottom_decile": bottom_decile,
        "fraction_degraded": degraded,
    }
    return {
        (group, name): f"{group}.{figure}"
        for group in GROUPS
        for name, figure in names.items()
    }


def documents_of(
    plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[PointRow]
) -> list[dict[str, Any]]:
    """Return the rows as plain values, as ``--json`` prints them."""
    if not isinstance(plan, Comparison):
        documents = [asdict(row) for row in rows]
        for document in documents:
            del document["figures"]  # points.csv has the figures of each seed
        return documents
    columns = compared_columns(plan)
    return [
        {
            "name": row.variant,
            "title": row.title,
            **{
                group: {
                    name: asdict(row.estimates[column])
                    for (of_group, name), column in columns.items()
                    if of_group == group
                }
                for group in GROUPS
            },
            "chosen": dict(row.values),
            **_choice_and_costs(outcome, row),
        }
        for outcome, row in zip(outcomes, rows, strict=True)
    ]


def _choice_and_costs(outcome: Outcome, row: PointRow) -> dict[str, Any]:
    """Return the last columns of a comparison's row."""
    scores = [
        candidate.score
        for candidate in outcome.candidates
        if candidate.point is outcome.point
    ]
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
            line = _sweep_line(row, plan.settings)
        else:
            line = _comparison_line(outcome, row, compared_columns(plan))
        lines.append({**line, **_origin_of(plan, outcome)})
    return csv_text(lines)


def _origin_of(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Return the columns about a row's runs that all batches share."""
    runs = [load_run(path) for path in outcome.runs.values()]
    if not runs:
        return {}
    first = runs[0]
    over, _ = by_data(runs)[0]
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


def _sweep_line(row: PointRow, settings: SweepSettings) -> dict[str, Any]:
    line = {
        "variant": row.variant,
        **{key: row.values[key] for key in settings.varied()},
        "num_runs": row.num_runs,
        "num_failed": row.num_failed,
    }
    for column, figure in row.estimates.items():
        line |= figure.flat(column, ".sd", ".half_width")
    return {**line, "title": row.title}


def _comparison_line(
    outcome: Outcome, row: PointRow, columns: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row.variant, "method": row.title}
    for (group, name), column in columns.items():
        line |= row.estimates[column].flat(f"{group}_{name}")
    last = _choice_and_costs(outcome, row)
    chosen = json.dumps(dict(row.values))
    return {**line, "validation": last["validation"], "chosen": chosen, **last}


def run_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return every run of a sweep with all its figures, as plain values."""
    return [
        {
            "variant": outcome.point.variant,
            **outcome.point.values,
            **_describe_run(outcome, seed),
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
            **_describe_run(outcome, seed),
            **{
                name: row.figures[seed].get(column)
                for name, column in columns.items()
                if seed in row.figures
            },
        }
        for outcome, row in zip(outcomes, rows, strict=True)
        for seed in outcome.point.runs
    ]


def _describe_run(outcome: Outcome, seed: int) -> dict[str, Any]:
    """Return the columns of points.csv that identify a run and its code."""
    run = outcome.runs.get(seed)
    return {
        "seed": seed,
        "run": None if run is None else run.name,
        "failure": outcome.failures.get(seed),
        "code": None if run is None else code_of(run),
    }


def column_of(settings: SweepSettings) -> str:
    """Return the column that a sweep shows and chooses by."""
    return f"{settings.group}.{settings.y}"


def table_of(plan: Plan, rows: Sequence[PointRow]) -> Table:
    """Return the table of a batch as text, fractions in percent."""
    if isinstance(plan, Sweep):
        return Table.of_cells(plan.name, _sweep_cells(plan.settings, rows))
    titles = {row.variant: row.title for row in rows}
    references = [titles[name] for name in plan.references]
    of_group = [f"vs {title}" for title in references]
    of_group += ["bottom decile", degraded_vs(references[0])]
    metric = "" if plan.metric == ACCURACY else f" {called(plan.metric).title}"
    header = ["method", f"seen{metric}", *of_group, f"unseen{metric}", *of_group]
    columns = compared_columns(plan).values()
    cells = [_comparison_cells(row, columns) for row in rows]
    return Table.of_cells(plan.name, [[*header, "s a run"], *cells])


def _comparison_cells(row: PointRow, columns: Iterable[str]) -> list[str]:
    cells = [f"{row.title}{_failures_text(row)}"]
    for column in columns:
        figure = column.partition(".")[2]
        cells.append(_estimate_text(row.estimates[column], figure))
    seconds = row.estimates[SECONDS].mean
    return [*cells, "-" if seconds is None else f"{seconds:.1f}"]


def _sweep_cells(settings: SweepSettings, rows: Sequence[PointRow]) -> list[list[str]]:
    metric = metric_of(settings.y)
    average = GLOBAL + figure_of(metric, "weighted")
    others = [
        figure_of(metric, name) for name in ("bottom_decile", "fraction_degraded")
    ]
    beside = [name for name in (average, *others) if name != settings.y]
    variants = variants_of(settings)
    header = [
        *(["variant"] if settings.variants else []),
        *map(term_of, settings.varied()),
        label_of(settings.y),
        "sd",
        "95 % interval",
        *(f"vs {variants[name].title or name}" for name in settings.references()),
        *map(label_of, beside),
        "runs",
    ]
    column = column_of(settings)
    cells = [header]
    for row in rows:
        shown = row.estimates[column]
        cells.append(
            [
                *([row.title] if settings.variants else []),
                *(as_text(row.values[key]) for key in settings.varied()),
                _number(shown.mean, settings.y),
                _number(shown.std, settings.y),
                _interval(shown, settings.y),
                *(
                    _estimate_text(
                        row.estimates[versus(column, name)], versus(settings.y, name)
                    )
                    for name in settings.references()
                ),
                *(
                    _number(row.estimates[f"{settings.group}.{name}"].mean, name)
                    for name in beside
                ),
                f"{row.num_runs}{_failures_text(row)}",
            ]
        )
    return cells


def _estimate_text(figure: Estimate, name: str) -> str:
    """Format mean and half of the 95 % interval; a difference with its sign."""
    sign = "+" if is_difference(name) and (figure.mean or 0.0) > 0 else ""
    half = ""
    if figure.half_width is not None:
        half = f" ± {_number(figure.half_width, name)}"
    return f"{sign}{_number(figure.mean, name)}{half}{figure.mark}"


def _failures_text(row: PointRow) -> str:
    return f" ({row.num_failed} failed)" if row.num_failed else ""


def _number(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if is_percent(name) else f"{value:.4g}"


def _interval(figure: Estimate, name: str) -> str:
    if figure.mean is None or figure.half_width is None:
        return "-"
    low, high = figure.mean - figure.half_width, figure.mean + figure.half_width
    if is_percent(name):
        # The interval of few seeds may reach beyond the range of a fraction.
        low, high = max(low, 0.0), min(high, 1.0)
    return f"{_number(low, name)} to {_number(high, name)}{figure.mark}"
