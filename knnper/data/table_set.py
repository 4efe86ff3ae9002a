"""A central data set in CSV or Parquet files: a row an example, a column a feature."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.config.errors import DataError
from knnper.config.ranges import NonNegativeInt, ProperFraction
from knnper.config.sections import Settings
from knnper.data.dataset import Dataset, LabelledArrays
from knnper.data.examples import InputSpec
from knnper.data.leaf.dividing import DividingSettings, mark_tested
from knnper.data.site.splits import FractionSettings, split_by_name
from knnper.data.table_file import (
    Columns,
    TableFile,
    read_table,
    row_names,
    values_in_order,
)

_LOG = logging.getLogger(__name__)

# Of float32, relative to a value; fewer of them in a deviation are too coarse.
_STEP = 2.0**-23
_FEWEST_STEPS = 100


@dataclass(frozen=True)
class TableSettings(Settings):
    """Which files, and what their columns mean.

    Attributes
    ----------
    train
        A CSV file with a header, or a Parquet file.
    label
        The column of labels.
    test
        Another such file; null takes `test_fraction` of the rows of `train`.
    features
        The columns of features; null is all other columns.
    id
        The column of the rows' names, on which the split depends; null is their number.
    client
        The column of the client whose row it is. The partition ``natural`` needs it.
    test_fraction, seed
        Part of the rows that are tested on where there is no file of them, and what
        chooses them. It is about that part; with `client`, that part of each client's
        rows, rounded, and one row of each is left to train on. Rows of the same name
        stay together.
    delimiter
        Between the columns of a CSV file.
    """

    train: str
    label: str
    test: str | None = None
    features: tuple[str, ...] | None = None
    id: str | None = None
    client: str | None = None
    test_fraction: ProperFraction = 0.2
    seed: NonNegativeInt = 0
    delimiter: Annotated[str, Field(min_length=1)] = ","


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of one split: float64 (n, d), and n texts each."""

    numbers: NDArray[np.float64]
    labels: tuple[str, ...]
    clients: tuple[str, ...] | None


def load_table(settings: TableSettings) -> Dataset:
    """Return the rows as inputs of shape (1, 1, d), float32.

    The classes are those of the training rows, in the order of their names, or of
    their numbers where all are whole numbers.

    Raises
    ------
    DataError
        As `read_table`; and if there are no training or test rows, or test rows have
        labels that no training row has.
    """
    first, table = _read(settings, settings.train, settings.features)
    if settings.test is None:
        train, test = _divided(first, table, settings)
    else:
        train, (test, _) = first, _read(settings, settings.test, table.number_columns)
    _require_rows(train, test, settings)
    class_names = values_in_order(train.labels)
    _require_known(test, class_names)
    owners = values_in_order([*(train.clients or ()), *(test.clients or ())])
    mean, std = _statistics(train.numbers)
    _warn_of_coarse(table, train.numbers)
    spec = InputSpec((1, 1, len(mean)), len(class_names), mean, std, dtype="float32")
    return Dataset(
        name="table",
        train=_labelled(train, class_names, owners),
        test=_labelled(test, class_names, owners),
        spec=spec,
        class_names=class_names,
        feature_names=table.number_columns,
    )


def _read(
    settings: TableSettings, file: str, features: tuple[str, ...] | None
) -> tuple[_Rows, TableFile]:
    texts = (settings.label, settings.id, settings.client)
    columns = Columns(tuple(dict.fromkeys(filter(None, texts))), features)
    path = Path(file).expanduser().absolute()
    table = read_table(path, columns, settings.delimiter)
    labels = table.filled_texts(settings.label)
    clients = None if settings.client is None else table.filled_texts(settings.client)
    return _Rows(table.numbers, labels, clients), table


def _divided(
    rows: _Rows, table: TableFile, settings: TableSettings
) -> tuple[_Rows, _Rows]:
    names = row_names(table)
    if settings.id is not None:
        names = table.filled_texts(settings.id)
    if rows.clients is None:
        fractions = FractionSettings(0.0, settings.test_fraction, settings.seed)
        is_test = np.array(split_by_name(names, fractions)) == "test"
    else:
        is_test = _tested_of_each(rows.clients, names, settings)
    return _taken(rows, ~is_test), _taken(rows, is_test)


def _tested_of_each(
    clients: Sequence[str], names: Sequence[str], settings: TableSettings
) -> NDArray[np.bool_]:
    """Mark a part of each client's rows, shape (n,)."""
    dividing = DividingSettings(
        test_fraction=settings.test_fraction, seed=settings.seed
    )
    names_of = defaultdict[str, set[str]](set)
    for client, name in zip(clients, names, strict=True):
        names_of[client].add(name)
    tested = set[tuple[str, str]]()
    for client, own in names_of.items():
        marks = mark_tested(len(own), client, dividing).tolist()
        pairs = zip(sorted(own), marks, strict=True)
        tested.update((client, name) for name, is_test in pairs if is_test)
    pairs = zip(clients, names, strict=True)
    return np.array([pair in tested for pair in pairs], dtype=bool)


def _require_rows(train: _Rows, test: _Rows, settings: TableSettings) -> None:
    if not train.labels:
        raise DataError(f"{settings.train}: there are no training rows; add some")
    if test.labels:
        return
    if settings.test is not None:
        raise DataError(
            f"{settings.test}: there are no test rows; add some, or leave out "
            "data.test to test on data.test_fraction of the rows of data.train"
        )
    raise DataError(
        f"{settings.train}: there are no test rows among {len(train.labels)}; raise "
        "data.test_fraction, of which a client's only row is never taken, or name a "
        "file of test rows in data.test"
    )


def _taken(rows: _Rows, chosen: NDArray[np.bool_]) -> _Rows:
    places = np.flatnonzero(chosen).tolist()
    clients = rows.clients
    return _Rows(
        rows.numbers[chosen],
        tuple(rows.labels[at] for at in places),
        None if clients is None else tuple(clients[at] for at in places),
    )


def _labelled(
    rows: _Rows, class_names: Sequence[str], owners: Sequence[str]
) -> LabelledArrays:
    count, width = rows.numbers.shape
    return LabelledArrays(
        images=rows.numbers.astype(np.float32).reshape(count, 1, 1, width),
        labels=_numbered(rows.labels, class_names),
        client_ids=None if rows.clients is None else _numbered(rows.clients, owners),
    )


def _numbered(values: Sequence[str], known: Sequence[str]) -> NDArray[np.int64]:
    number_of = {value: number for number, value in enumerate(known)}
    return np.array([number_of[value] for value in values], dtype=np.int64)


def _require_known(test: _Rows, class_names: Sequence[str]) -> None:
    unknown = sorted(set(test.labels) - set(class_names))
    if unknown:
        raise DataError(
            f"test rows have labels that no training row has: {', '.join(unknown)}; "
            "the classes are those of the training rows"
        )


def _statistics(
    numbers: NDArray[np.float64],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each feature; 1 for one that never varies."""
    deviations = np.where(np.ptp(numbers, axis=0) == 0, 1.0, numbers.std(axis=0))
    return tuple(numbers.mean(axis=0).tolist()), tuple(deviations.tolist())


def _warn_of_coarse(table: TableFile, numbers: NDArray[np.float64]) -> None:
    """Say which features float32 holds too coarsely, such as times since 1970."""
    step = _STEP * np.abs(numbers.mean(axis=0))
    varies = np.ptp(numbers, axis=0) > 0
    is_coarse = varies & (numbers.std(axis=0) < _FEWEST_STEPS * step)
    if is_coarse.any():
        _LOG.warning(
            "%s: values of %s are so large, and differ so little, that float32 loses "
            "their differences; subtract an offset from these columns, such as their "
            "least value, in all files",
            table.path,
            ", ".join(table.number_columns[at] for at in np.flatnonzero(is_coarse)),
        )
