"""A comparison from its plan to its tuned and tested rows.

Every run has a folder named by what it is. A comparison that was interrupted, or whose
file grew, makes only what is missing.
"""

import csv
import io
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_jsonable_python

from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.files import write_atomically
from knnper.loading import dump_yaml, parse_overrides
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.folder import TABLE, Identity, batch_folder, older_code
from knnper.simulation.batches.plan import (
    ALONE,
    FIGURES,
    GLOBAL,
    VARIANT,
    Candidate,
    Comparison,
    Point,
    PointsValues,
    Row,
    Sweep,
    SweepSettings,
    VariantSettings,
    term_of,
    variants_of,
)
from knnper.simulation.batches.progress import Advance, Progress, Tracker
from knnper.simulation.batches.runner import (
    FAILED,
    Family,
    by_seed,
    failure_remark,
    families_of,
    folder_of,
    is_done,
    play_side_by_side,
    require_same_inputs,
    why_failed,
    with_earlier_training,
)
from knnper.simulation.reports.figure import (
    SERIES,
    accuracy_axis,
    colors_of,
    styled,
    write_pictures,
)
from knnper.simulation.reports.outside_text import chart_text
from knnper.simulation.reports.runs import (
    EVERYBODY,
    ClientRow,
    Estimate,
    clients_of,
    estimate,
    fraction_degraded_against,
    load_run,
)
from knnper.simulation.reports.runs import GROUPS as OF_RESULTS
from knnper.simulation.reports.tables import VS_GLOBAL, Chart, Shown, Table, degraded_vs

COMMAND = ("knnper", "compare")


@dataclass(frozen=True)
class Scored:
    """A candidate and how it did on validation data.

    Attributes
    ----------
    candidate
        What was tried.
    score
        Accuracy of the personalised models of the seen clients, weighted by their
        validation data; None where the run failed, or was not needed.
    failure
        Why it failed.
    """

    candidate: Candidate
    score: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A row that was tuned and tested.

    Attributes
    ----------
    row
        What it is.
    tried
        All candidates, in the order of the grid; one alone is not scored.
    chosen
        The best; of equal ones the first.
    runs
        The folders of the tested runs by seed.
    failures
        Why, by seed, of those that failed.
    """

    row: Row
    tried: Sequence[Scored]
    chosen: Candidate
    runs: Mapping[int, Path]
    failures: Mapping[int, str] = field(default_factory=dict)


def num_runs(comparison: Comparison) -> int:
    """Return how many runs a comparison takes."""
    tuned = sum(len(row.candidates) for row in comparison.rows if _is_tuned(row))
    return tuned + len(comparison.rows) * len(comparison.seeds)


def compare(
    comparison: Comparison,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = COMMAND,
) -> list[Outcome]:
    """Make all runs that are missing in ``folder``; return how each row was chosen.

    Parameters
    ----------
    comparison
        What to run.
    folder
        Holds a folder for each run.
    num_workers
        Processes side by side; what they compute does not depend on it.
    advance
        Told how far the comparison is, in runs.
    command
        What was typed, for the runs' manifests.

    Raises
    ------
    FolderTakenError
        If the folder is a file, or holds another batch or something else.
    RunError
        If another process is at work in it, runs in it were made from other data, all
        candidates of a row fail, or the reference row fails when it is tested.
    """
    tracker, total = Tracker(num_workers), num_runs(comparison)
    before = found = 0

    def make(experiments: Sequence[Experiment], later: Sequence[Experiment]) -> None:
        nonlocal before, found
        families = families_of(experiments, folder, command)
        require_same_inputs(families)
        missing = tracker.expect(families, families_of(later, folder, command))
        # Rows can have a run in common, which then counts for each.
        folders = [folder_of(one, folder) for one in experiments]
        done = sum(map(is_done, folders))
        found += done
        advance(Progress(before + done, total, found, tracker.left()))
        for told in play_side_by_side(missing, num_workers):
            tracker.note(told)
            done = sum(map(is_done, folders))
            advance(Progress(before + done, total, found, tracker.left()))
        before += len(folders)

    with batch_folder(folder, Identity("comparison", comparison.name)):
        return _compare(comparison, folder, make)


def _compare(
    comparison: Comparison,
    folder: Path,
    make: Callable[[Sequence[Experiment], Sequence[Experiment]], None],
) -> list[Outcome]:
    tuned = [row for row in comparison.rows if _is_tuned(row)]
    tuning = [one.tuning for row in tuned for one in row.candidates]
    # Nobody knows yet which candidates are chosen; they take about as long.
    later = [
        row.candidates[0].tested(seed)
        for row in comparison.rows
        for seed in comparison.seeds
    ]
    make(tuning, later)
    chosen = {row.name: _choose(row, folder) for row in comparison.rows}
    tested = [
        candidate.tested(seed)
        for _, candidate in chosen.values()
        for seed in comparison.seeds
    ]
    make(tested, ())
    return [
        _outcome(row, *chosen[row.name], comparison, folder) for row in comparison.rows
    ]


def _is_tuned(row: Row) -> bool:
    return len(row.candidates) > 1


def _choose(row: Row, folder: Path) -> tuple[Sequence[Scored], Candidate]:
    if not _is_tuned(row):
        (only,) = row.candidates
        return [Scored(only)], only
    tried = [_scored(candidate, folder) for candidate in row.candidates]
    scored = [one for one in tried if one.score is not None]
    if not scored:
        reason = next((one.failure for one in tried if one.failure), "no score")
        raise RunError(
            f"no candidate of the row {row.name} has a score on validation data; the "
            f"first reason: {reason}. Change its grid, with smaller learning rates "
            "where training diverged; a run is made again when its folder in "
            f"{folder / 'runs'} is deleted"
        )
    # The first of equal ones: max keeps it.
    return tried, max(scored, key=lambda one: one.score or 0.0).candidate


def _scored(candidate: Candidate, folder: Path) -> Scored:
    path = folder_of(candidate.tuning, folder)
    failure = why_failed(path)
    if failure is not None:
        return Scored(candidate, failure=failure)
    seen = RunFolder(path).results()["seen"]
    return Scored(candidate, seen["accuracy_weighted"])


def _outcome(
    row: Row,
    tried: Sequence[Scored],
    chosen: Candidate,
    comparison: Comparison,
    folder: Path,
) -> Outcome:
    tested = {seed: chosen.tested(seed) for seed in comparison.seeds}
    runs, failures = by_seed(tested, folder)
    if failures and row.name == comparison.reference:
        seed, reason = next(iter(failures.items()))
        what, run = f"the reference row {row.name}", folder_of(tested[seed], folder)
        raise RunError(
            f"{failure_remark(what, seed, reason, run)}. Without it nobody can be "
            "compared; change its grid or choose another reference"
        )
    return Outcome(row, tried, chosen, runs, failures)


def folders_of(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Return the folders of all runs that tuned or tested these rows."""
    tuned = [
        folder_of(one.candidate.tuning, folder)
        for outcome in outcomes
        if len(outcome.tried) > 1
        for one in outcome.tried
    ]
    return [*tuned, *(path for one in outcomes for path in one.runs.values())]


GROUPS = ("seen", "unseen")


@dataclass(frozen=True)
class GroupFigures:
    """How a row did on one group of clients, over the seeds; fractions of 1.

    Attributes
    ----------
    average, bottom_decile
        As in `knnper.server.results.Summary`: ``accuracy_weighted``,
        ``accuracy_bottom_decile``.
    fraction_degraded
        `knnper.server.results.fraction_degraded` against the reference row's run of the
        same seed.
    """

    average: Estimate
    bottom_decile: Estimate
    fraction_degraded: Estimate


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Attributes
    ----------
    name, title
        Of the row.
    seen, unseen
        Its figures.
    chosen
        What was chosen on validation data, by key.
    validation
        The accuracy that it was chosen for.
    seconds
        Of one tested run, mean over the seeds; None if all failed.
    num_failed
        Seeds with which the run failed: they are in no figure.
    """

    name: str
    title: str
    seen: GroupFigures
    unseen: GroupFigures
    chosen: Mapping[str, Any]
    validation: float | None
    seconds: float | None
    num_failed: int


def table_of(outcomes: Sequence[Outcome], reference: str) -> list[TableRow]:
    """Return a row for each outcome, in their order.

    Parameters
    ----------
    outcomes
        Tuned and tested rows.
    reference
        The name of the one that clients are compared with.

    Raises
    ------
    RunError
        If the file of a run's clients is missing or damaged.
    """
    (runs,) = [one.runs for one in outcomes if one.row.name == reference]
    base = {
        seed: {one.client: one.accuracy for one in _clients(path)}
        for seed, path in runs.items()
    }
    return [_row(outcome, base) for outcome in outcomes]


def _row(outcome: Outcome, base: Mapping[int, Mapping[str, float]]) -> TableRow:
    results = {seed: RunFolder(path).results() for seed, path in outcome.runs.items()}
    clients = {seed: _clients(path) for seed, path in outcome.runs.items()}

    def degraded(seed: int, *, seen: bool) -> float | None:
        of_group = (one for one in clients[seed] if one.seen == seen)
        return fraction_degraded_against(of_group, base[seed])

    def group(name: str) -> GroupFigures:
        documents = [one[name] for one in results.values()]
        return GroupFigures(
            estimate(one["accuracy_weighted"] for one in documents),
            estimate(one["accuracy_bottom_decile"] for one in documents),
            estimate(degraded(seed, seen=name == "seen") for seed in clients),
        )

    scores = {id(one.candidate): one.score for one in outcome.tried}
    return TableRow(
        name=outcome.row.name,
        title=outcome.row.title,
        seen=group("seen"),
        unseen=group("unseen"),
        chosen=outcome.chosen.values,
        validation=scores.get(id(outcome.chosen)),
        seconds=estimate(map(_seconds, results.values())).mean,
        num_failed=len(outcome.failures),
    )


def _seconds(results: Mapping[str, Any]) -> float:
    training = results["training"]
    return float(training["seconds"] + training["personalization_seconds"])


def _clients(path: Path) -> list[ClientRow]:
    try:
        return clients_of(path)
    except RunError as error:
        raise RunError(
            f"{error}. Delete {path}, and the same command makes the run anew"
        ) from error


def spread_remark(rows: Sequence[TableRow], num_seeds: int) -> str | None:
    """Return what stands after ± in the table; None where it stands nowhere."""
    figures = [row.seen.average for row in rows] + [row.unseen.average for row in rows]
    if all(figure.std is None for figure in figures):
        return None
    return (
        f"In the comparison's table ± is the standard deviation over {num_seeds} "
        "seeds; table.csv has half of the 95 % intervals too"
    )


def as_cells(rows: Sequence[TableRow], reference: str) -> list[list[str]]:
    """Return a header and the rows as text, in percent.

    Parameters
    ----------
    rows
        As `table_of` returns them.
    reference
        The name of the row that clients are compared with.
    """
    (title,) = [row.title for row in rows if row.name == reference]
    of_group = ("bottom decile", degraded_vs(title))
    header = ["method", "seen", *of_group, "unseen", *of_group, "s a run"]
    return [header, *(_cells(row) for row in rows)]


def _cells(row: TableRow) -> list[str]:
    figures = [
        figure
        for group in (row.seen, row.unseen)
        for figure in (group.average, group.bottom_decile, group.fraction_degraded)
    ]
    seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
    failed = f" ({row.num_failed} failed)" if row.num_failed else ""
    return [row.title + failed, *map(_percent, figures), seconds]


def _percent(figure: Estimate) -> str:
    if figure.mean is None:
        return "-"
    mean = f"{100 * figure.mean:.1f}"
    return mean if figure.std is None else f"{mean} ± {100 * figure.std:.1f}"


def as_csv(rows: Sequence[TableRow]) -> str:
    """Return every figure, a column each, fractions of 1; empty where there is none.

    A column ``NAME_std`` has the standard deviation over the seeds, and one
    ``NAME_half_width`` half of the 95 % interval.
    """
    text = io.StringIO()
    documents = [_flat(row) for row in rows]
    writer = csv.DictWriter(text, list(documents[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(documents)
    return text.getvalue()


def _flat(row: TableRow) -> dict[str, Any]:
    flat: dict[str, Any] = {"row": row.name, "method": row.title}
    for group in GROUPS:
        for name, figure in asdict(getattr(row, group)).items():
            flat[f"{group}_{name}"] = figure["mean"]
            flat[f"{group}_{name}_std"] = figure["std"]
            flat[f"{group}_{name}_half_width"] = figure["half_width"]
    flat["validation"] = row.validation
    flat["chosen"] = json.dumps(dict(row.chosen))
    flat["seconds"] = row.seconds
    flat["num_failed"] = row.num_failed
    return flat


def write_comparison(
    comparison: Comparison,
    outcomes: Sequence[Outcome],
    rows: Sequence[TableRow],
    folder: Path,
) -> Shown:
    """Write the table as Markdown and as CSV.

    Parameters
    ----------
    comparison
        What was run.
    outcomes
        Its rows, tuned and tested.
    rows
        `table_of` them.
    folder
        Holds the runs.
    """
    table = Table.of_cells(comparison.name, as_cells(rows, comparison.reference))
    spread = spread_remark(rows, len(comparison.seeds))
    told = [] if spread is None else [spread]
    below = "".join(f"\n{line}\n" for line in told)
    write_atomically(folder / TABLE, table.as_markdown() + below)
    write_atomically(folder / "table.csv", as_csv(rows))
    older = older_code(folders_of(outcomes, folder), folder)
    failures = (*_not_chosen(outcomes), *_failures(outcomes, folder))
    return Shown((table,), remarks=(*told, *failures, *older))


def _not_chosen(outcomes: Sequence[Outcome]) -> Iterator[str]:
    tried = [one for outcome in outcomes for one in outcome.tried]
    failed = [one for one in tried if one.failure is not None]
    if failed:
        yield (
            f"{len(failed)} of {len(tried)} candidates failed on validation data and "
            f"were not chosen; {FAILED} in the folder of each run says why. To make "
            "one again, delete its folder"
        )


def _failures(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    for outcome in outcomes:
        for seed, reason in outcome.failures.items():
            run = folder_of(outcome.chosen.tested(seed), folder)
            yield failure_remark(outcome.row.title, seed, reason, run)


RUNNING_COMMAND = ("knnper", "sweep")


@dataclass(frozen=True)
class RunningOutcome:
    """A point that was made.

    Attributes
    ----------
    point
        What it is.
    runs
        The folders of its runs by seed.
    failures
        Why, by seed, of those that failed, as where training diverges.
    """

    point: Point
    runs: Mapping[int, Path]
    failures: Mapping[int, str]


def num_steps(sweep: Sweep) -> int:
    """Return how many steps a sweep takes.

    A step is a round of a training, which several runs may share, or the hand-over of
    a run.
    """
    return sum(map(_num_steps, _families(sweep, Path())))


def runs_there(sweep: Sweep, folder: Path) -> tuple[int, int]:
    """Return how many runs a sweep takes, and how many are done in ``folder``."""
    orders = [order for family in _families(sweep, folder) for order in family.orders]
    return len(orders), sum(is_done(order.folder) for order in orders)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = RUNNING_COMMAND,
    earlier: Sequence[Path] = (),
) -> list[RunningOutcome]:
    """Make all runs that are missing in ``folder``; return the points.

    Parameters
    ----------
    sweep
        What to run.
    folder
        Holds a folder for each run.
    num_workers
        Processes side by side; what they compute does not depend on it.
    advance
        Told how far the sweep is, in steps.
    command
        What was typed, for the runs' manifests.
    earlier
        Folders of finished runs, whose training those of the sweep's runs take over
        that train the same.

    Raises
    ------
    FolderTakenError
        If the folder is a file, or holds another batch or something else.
    RunError
        If another process is at work in it, or runs in it or the earlier ones were
        made from other data; and as `with_earlier_training`.
    KnnPerError
        If a run cannot be made for another reason than that its clients fail.
    """
    families = with_earlier_training(_families(sweep, folder, command), earlier)
    with batch_folder(folder, Identity("sweep", sweep.settings.name)):
        _make(families, num_workers, advance)
    return [
        RunningOutcome(point, *by_seed(point.runs, folder)) for point in sweep.points
    ]


def _families(
    sweep: Sweep, folder: Path, command: Sequence[str] = RUNNING_COMMAND
) -> list[Family]:
    return families_of(sweep.experiments, folder, command, keeps_training=True)


def _make(families: Sequence[Family], num_workers: int, advance: Advance) -> None:
    require_same_inputs(families)
    tracker = Tracker(num_workers)
    missing = tracker.expect(families)
    done = found = tracker.num_made
    advance(Progress(done, tracker.num_steps, found, tracker.left()))
    for told in play_side_by_side(missing, num_workers):
        tracker.note(told)
        # Rounds since the last checkpoint are repeated, and counted once.
        done = max(done, tracker.num_made)
        advance(Progress(done, tracker.num_steps, found, tracker.left()))


def _num_steps(family: Family) -> int:
    return family.num_rounds + len(family.orders)


FIGURES_GROUPS = (*OF_RESULTS, EVERYBODY)

COLUMNS = tuple(
    f"{group}.{prefix}{figure}"
    for group in FIGURES_GROUPS
    for prefix in ("", GLOBAL)
    for figure in FIGURES
)
"""What there is of each run, as in ``unseen.global.accuracy_weighted``."""

Figures = Mapping[str, float | None]
"""By column; None where there is no such figure."""


@dataclass(frozen=True)
class PointFigures:
    """How a point did.

    Attributes
    ----------
    variant, title, values
        Of the point.
    estimates
        By column, over its seeds.
    num_runs, num_failed
        Seeds that have figures, and seeds with which training diverged.
    """

    variant: str
    title: str
    values: PointsValues
    num_runs: int
    num_failed: int
    estimates: Mapping[str, Estimate] = field(repr=False)


def column_of(settings: SweepSettings) -> str:
    """Return the column that a sweep shows and chooses by."""
    return f"{settings.group}.{settings.y}"


def figures_of(run: Path) -> Figures:
    """Return the figures of a finished run by column, fractions of 1."""
    found = load_run(run)
    return {
        f"{group}.{prefix}{figure}": document.get(figure)
        for group in FIGURES_GROUPS
        for own in (found.figures(group),)
        for prefix, document in (("", own), (GLOBAL, own["global"]))
        for figure in FIGURES
    }


def estimated(outcomes: Sequence[RunningOutcome]) -> list[PointFigures]:
    """Return the mean and the interval of every figure of each point."""
    return [_estimated(outcome) for outcome in outcomes]


def _estimated(outcome: RunningOutcome) -> PointFigures:
    found = [figures_of(run) for run in outcome.runs.values()]
    return PointFigures(
        variant=outcome.point.variant,
        title=outcome.point.title,
        values=outcome.point.values,
        num_runs=len(outcome.runs),
        num_failed=len(outcome.failures),
        estimates={
            column: estimate(figures[column] for figures in found) for column in COLUMNS
        },
    )


def run_rows(outcomes: Sequence[RunningOutcome]) -> list[dict[str, Any]]:
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


_REPLACED = ("method", "personalization")
"""Sections of a variant that stand in place of the base's, even if they are empty."""

LOWER_IS_BETTER = ("accuracy_std", "fraction_degraded", "ece", "log_loss")


def best_points(sweep: Sweep, rows: Sequence[PointFigures]) -> list[PointFigures]:
    """Return the best point of each variant, of equal ones the first.

    A point counts only if it has the figure with every seed: the mean over fewer is
    not to be compared.

    Raises
    ------
    RunError
        If a variant has no such point.
    """
    return [
        _best(name, [row for row in rows if row.variant == name], sweep)
        for name in variants_of(sweep.settings)
    ]


def _best(name: str, rows: Sequence[PointFigures], sweep: Sweep) -> PointFigures:
    column, num_seeds = column_of(sweep.settings), len(sweep.settings.seeds)
    means = {
        number: row.estimates[column].mean or 0.0
        for number, row in enumerate(rows)
        if row.estimates[column].count == num_seeds
    }
    if not means:
        raise RunError(
            f"no point of the variant {name} has the figure {column} with every seed; "
            "choose by another y or group, or change the values that diverge"
        )
    figure = sweep.settings.y.removeprefix(GLOBAL)
    sign = -1 if figure in LOWER_IS_BETTER else 1
    # The first of equal ones: max keeps it.
    return rows[max(means, key=lambda number: sign * means[number])]


def chosen_sweep(sweep: Sweep, best: Sequence[PointFigures]) -> str:
    """Return the file of a sweep that tests the best points, each once a seed."""
    settings = sweep.settings
    variants = variants_of(settings)
    chosen = {
        "chosen" if one.variant == ALONE else one.variant: _fixed(
            variants[one.variant], sweep.overrides, one.values
        )
        for one in best
    }
    document = {
        "name": f"{settings.name}-chosen",
        "evaluate_on": "test",
        "seeds": list(settings.seeds),
        "y": settings.y,
        "group": settings.group,
        **({"x": VARIANT} if len(chosen) > 1 else {}),
        "set": dict(settings.set),
        "base": {key: value for key, value in sweep.shared.items() if key != "name"},
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


def table_as_cells(
    rows: Sequence[PointFigures], settings: SweepSettings
) -> list[list[str]]:
    """Return a header and a row for each point as text, fractions in percent."""
    beside = [figure for figure in BESIDE if figure != settings.y]
    variant = ["variant"] if settings.variants else []
    shown = [label_of(settings.y), "sd", "95 % interval", *map(label_of, beside)]
    header = [*variant, *map(term_of, settings.varied()), *shown, "runs"]
    return [header, *(_table_cells(row, settings, beside) for row in rows)]


def _table_cells(
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


def table_as_csv(rows: Sequence[PointFigures], settings: SweepSettings) -> str:
    """Return every figure of each point, fractions of 1; empty where there is none.

    A column ``NAME.sd`` has the standard deviation over the seeds, and one
    ``NAME.half_width`` half of the 95 % interval.
    """
    return csv_text([_table_flat(row, settings) for row in rows])


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


def _table_flat(row: PointFigures, settings: SweepSettings) -> dict[str, Any]:
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


_SIZE_INCHES = (7.2, 4.2)

_ORDERS_FOR_LOG = 100
"""From this ratio of the largest to the smallest value on, the axis is logarithmic."""

_LEAST_GAP = 0.04
"""Of the axis, between two values that are both named."""

_MARGIN = 0.02

_MARKERS = "os^Dv"

_DASHES = ("-", "--", ":", "-.")

CurveKey = tuple[str, ...]
"""What tells a curve apart, as text."""

Style = Mapping[str, Any]
"""Arguments of matplotlib."""


def plot_of(rows: Sequence[PointFigures], settings: SweepSettings) -> Figure | None:
    """Return the plot that a sweep asks for; None without ``x`` or any figure.

    Grids are drawn as curves, random points and names as dots. Bars are 95 %
    t-intervals over the seeds. The first key of ``series`` has the colours, the others
    the dashes.
    """
    column = column_of(settings)
    rows = [row for row in rows if row.estimates[column].mean is not None]
    if settings.x is None or not rows:
        return None
    return _plot(rows, settings, settings.x)


@styled
def _plot(rows: Sequence[PointFigures], settings: SweepSettings, key: str) -> Figure:
    column = column_of(settings)
    figure = Figure(_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    places = _places([_at(row, key) for row in rows], axes)
    curves = _curves(rows, settings.curve_keys())
    dots = {} if _is_joined(settings, rows) else {"linestyle": "none"}
    for curve, style in zip(curves.values(), _styles(list(curves)), strict=True):
        placed = [(places[_text(_at(row, key))], row) for row in curve]
        _draw(axes, placed, column, {**style, **dots})
    axes.set_xlabel(chart_text(term_of(key)))
    if settings.series:
        _add_legend(figure, settings)
    _vertical(axes, settings)
    return figure


def _at(row: PointFigures, key: str) -> Any:
    return row.title if key == VARIANT else row.values[key]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_joined(settings: SweepSettings, rows: Sequence[PointFigures]) -> bool:
    values = [_at(row, settings.x or "") for row in rows]
    return settings.random is None and all(map(_is_number, values))


def _places(values: Sequence[Any], axes: Axes) -> dict[str, float]:
    """Return where on the horizontal axis each value is; set the axis up for it."""
    if all(map(_is_number, values)):
        if min(values) > 0 and max(values) >= _ORDERS_FOR_LOG * min(values):
            axes.set_xscale("log")
        _name_values(values, axes)
        return {_text(value): float(value) for value in values}
    names = list(dict.fromkeys(map(_text, values)))
    shown = list(map(chart_text, names))
    axes.set_xticks(range(len(names)), shown, rotation=30, ha="right")
    return {name: float(place) for place, name in enumerate(names)}


def _name_values(values: Sequence[float], axes: Axes) -> None:
    """Write each value on the horizontal axis, where they are far enough apart."""
    named = np.unique(values)
    gaps = np.diff(np.log(named) if axes.get_xscale() == "log" else named)
    if len(gaps) and gaps.min() >= _LEAST_GAP * gaps.sum():
        axes.set_xticks(named, [f"{value:g}" for value in named])
        axes.minorticks_off()


def _curves(
    rows: Sequence[PointFigures], keys: Sequence[str]
) -> Mapping[CurveKey, list[PointFigures]]:
    """Return the rows of each curve by what ``keys`` are on it."""
    curves: dict[CurveKey, list[PointFigures]] = {}
    for row in rows:
        curves.setdefault(tuple(_text(_at(row, key)) for key in keys), []).append(row)
    return curves


def _styles(curves: Sequence[CurveKey]) -> Iterator[Style]:
    """Yield how each curve is drawn."""
    names = list(dict.fromkeys(values[:1] for values in curves))
    others = list(dict.fromkeys(values[1:] for values in curves))
    colors = colors_of(", ".join(name) for name in names)
    for values in curves:
        number = names.index(values[:1])
        yield {
            "label": chart_text(", ".join(values)),
            "color": colors[number].light,
            "marker": _MARKERS[number // len(SERIES) % len(_MARKERS)],
            "linestyle": _DASHES[others.index(values[1:]) % len(_DASHES)],
        }


def _draw(
    axes: Axes,
    curve: Sequence[tuple[float, PointFigures]],
    column: str,
    style: Style,
) -> None:
    curve = sorted(curve, key=lambda one: one[0])
    found = [row.estimates[column] for _, row in curve]
    axes.errorbar(
        [place for place, _ in curve],
        [one.mean or 0.0 for one in found],
        yerr=[one.half_width or 0.0 for one in found],
        markersize=4,
        capsize=3,
        **style,
    )


def _add_legend(figure: Figure, settings: SweepSettings) -> None:
    """Put the legend beside the curves, which may be many."""
    title = ",\n".join(chart_text(term_of(key)) for key in settings.curve_keys())
    figure.legend(title=title, loc="outside right upper", fontsize="small")


def _vertical(axes: Axes, settings: SweepSettings) -> None:
    label = f"{label_of(settings.y)}, {settings.group} clients"
    if is_percent(settings.y):
        accuracy_axis(axes, label)
        # Intervals of few seeds may reach beyond; the dots at the ends are shown whole.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_MARGIN), min(high, 1 + _MARGIN))
    else:
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)


_LEAST_SEEDS = 3
"""From which an interval can be told."""

PLOT = "plot"

CHOSEN = "chosen.yaml"


def write_sweep(
    sweep: Sweep,
    outcomes: Sequence[RunningOutcome],
    rows: Sequence[PointFigures],
    folder: Path,
) -> Shown:
    """Write tables and plot, and with validation data the sweep that tests the best.

    Parameters
    ----------
    sweep
        What was run.
    outcomes
        Its points.
    rows
        `estimated` of them.
    folder
        Holds the runs.

    Raises
    ------
    RunError
        If a choice is asked for and a variant has no point to choose.
    """
    settings = sweep.settings
    _forget(folder)
    table = Table.of_cells(settings.name, table_as_cells(rows, settings))
    write_atomically(folder / "points.csv", csv_text(run_rows(outcomes)))
    write_atomically(folder / "table.csv", table_as_csv(rows, settings))
    write_atomically(folder / TABLE, table.as_markdown())
    figure = plot_of(rows, settings)
    if figure is not None:
        write_pictures(folder, PLOT, figure)
    chosen = _writing_choose(sweep, rows, folder) if _chooses(settings) else ()
    return Shown(
        (table,),
        () if figure is None else (Chart(PLOT, _title(settings), lambda: figure),),
        (*_writing_failures(outcomes, folder), *_older(outcomes, folder), *chosen),
    )


def _forget(folder: Path) -> None:
    """Remove what an earlier state of the sweep left and this one may not write."""
    for name in (CHOSEN, *(f"{PLOT}.{ending}" for ending in ("svg", "pdf", "png"))):
        (folder / name).unlink(missing_ok=True)


def _chooses(settings: SweepSettings) -> bool:
    return settings.evaluate_on == "validation"


def _title(settings: SweepSettings) -> str:
    figure, key = label_of(settings.y), term_of(settings.x or "")
    return (
        f"{figure[0].upper()}{figure[1:]} of {settings.group} clients by {key}; "
        "bars are 95 % intervals over the seeds"
    )


def _writing_failures(
    outcomes: Sequence[RunningOutcome], folder: Path
) -> Iterator[str]:
    for outcome in outcomes:
        point = outcome.point
        for seed, reason in outcome.failures.items():
            what = f"{point.variant} {dict(point.values)}"
            run = folder_of(point.runs[seed], folder)
            yield failure_remark(what, seed, reason, run)


def _older(outcomes: Sequence[RunningOutcome], folder: Path) -> Iterator[str]:
    runs = {run for outcome in outcomes for run in outcome.runs.values()}
    yield from older_code(runs, folder)


def _writing_choose(
    sweep: Sweep, rows: Sequence[PointFigures], folder: Path
) -> list[str]:
    """Write the sweep that tests the best points; return what they are."""
    best = best_points(sweep, rows)
    path = folder / CHOSEN
    write_atomically(path, chosen_sweep(sweep, best))
    of_what = [f" of {one.variant}" if sweep.settings.variants else "" for one in best]
    return [
        *(
            f"best{of_variant} on validation data: {dict(one.values)}"
            for of_variant, one in zip(of_what, best, strict=True)
        ),
        f"To test it, once: knnper sweep {shlex.quote(str(path))} --set "
        f"'seeds={_other_seeds(sweep.settings.seeds)}'",
    ]


def _other_seeds(seeds: Sequence[int]) -> list[int]:
    """Return seeds that nothing was chosen with."""
    unused = (seed for seed in itertools.count() if seed not in seeds)
    return list(itertools.islice(unused, max(_LEAST_SEEDS, len(seeds))))
