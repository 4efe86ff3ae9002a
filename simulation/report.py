"""Finished runs side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knnper.config.errors import RunError
from server.run_folder import RunFolder
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS
from strategies.experiments import title_of

GROUPS = ("seen", "unseen")


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    name
        The name of its folder.
    results
        The content of ``results.json``.
    """

    name: str
    results: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """How one model did on one group of clients; None is not known.

    Attributes
    ----------
    run
        The name of the run's folder.
    method
        The method's title.
    group
        ``seen`` or ``unseen``.
    average, bottom_decile, fraction_hurt, num_clients
        See `server.results.Summary`; ``average`` is weighted by local test size.
    num_rounds, seconds
        What training took, with the hand-over for a personalised model.
    is_reference
        Whether it is the unpersonalised model of a method that goes on from it.
    """

    run: str
    method: str
    group: str
    average: float | None
    bottom_decile: float | None
    fraction_hurt: float | None
    num_clients: int
    num_rounds: int | None
    seconds: float | None
    is_reference: bool


def load_run(path: Path) -> Run:
    """Return the finished run in the folder ``path``.

    Raises
    ------
    RunError
        If there is no run, it is not done, or its results are damaged.
    """
    folder = RunFolder.open(path)
    results = folder.results()
    missing = {"method", "training", *GROUPS} - results.keys()
    if missing:
        raise RunError(
            f"{path / 'results.json'} is damaged: {', '.join(sorted(missing))} missing"
        )
    return Run(path.resolve().name, results)


def comparison_table(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of a table that compares methods: seen clients, then unseen.

    A run gives one row a group, and one more for its unpersonalised model where that
    differs. Runs that trained the same global model share its row.
    """
    runs = list(runs)
    rows = [row for group in GROUPS for run in runs for row in _rows(run, group)]
    shown = {_model(row) for row in rows if not row.is_reference}
    table = []
    for row in rows:
        if not row.is_reference or _model(row) not in shown:
            table.append(row)
            shown.add(_model(row))
    return table


def as_documents(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values."""
    return [asdict(row) for row in rows]


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    header, *body = as_cells(rows)
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [_padded(cells, widths) for cells in (header, *body)]
    rule = _padded(["-" * width for width in widths], widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def as_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return a header and the rows as text; with the run where there are several."""
    several = len({row.run for row in rows}) > 1
    header = ["method", "group", "average", "bottom decile", "share hurt"]
    header += ["clients", "rounds", "seconds"]
    table = [["run", *header] if several else header]
    for row in rows:
        cells = _cells(row)
        table.append([row.run, *cells] if several else cells)
    return table


def _model(row: Row) -> tuple[object, ...]:
    """Return by what two rows of the same model are known."""
    return (row.method, row.group, row.average, row.bottom_decile, row.num_clients)


def _rows(run: Run, group: str) -> Iterable[Row]:
    personal = dict(run.results[group])
    reference = personal.pop("global")
    if personal["num_clients"] == 0:
        return
    title = _reference_title(run)
    if title is not None and personal != reference:
        yield _row(run, title, group, reference, is_reference=True)
    yield _row(run, _title(run), group, personal, is_reference=False)


def _row(
    run: Run, title: str, group: str, figures: Mapping[str, Any], *, is_reference: bool
) -> Row:
    training = run.results["training"]
    seconds = training.get("seconds")
    if seconds is not None and not is_reference:
        seconds += training.get("personalization_seconds", 0.0)
    return Row(
        run=run.name,
        method=title,
        group=group,
        average=figures["accuracy_weighted"],
        bottom_decile=figures["accuracy_bottom_decile"],
        fraction_hurt=figures["fraction_hurt"],
        num_clients=figures["num_clients"],
        num_rounds=training.get("num_rounds"),
        seconds=seconds,
        is_reference=is_reference,
    )


def _title(run: Run) -> str:
    name = str(run.results["method"])
    # Before there was a choice, every method had its own.
    default = METHODS[name].personalization if name in METHODS else AS_IT_IS
    return title_of(name, str(run.results.get("personalization", default)))


def _reference_title(run: Run) -> str | None:
    name = str(run.results["method"])
    return METHODS[name].reference_title if name in METHODS else f"{name} (global)"


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        row.group,
        _percent(row.average),
        _percent(row.bottom_decile),
        _percent(row.fraction_hurt),
        str(row.num_clients),
        "-" if row.num_rounds is None else str(row.num_rounds),
        "-" if row.seconds is None else f"{row.seconds:.1f}",
    ]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
