"""Data sets in CSV or Parquet files: texts and numbers by column."""

import importlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.dividing import (
    DividingSettings,
    FractionSettings,
    are_whole_numbers,
    mark_tested,
    numbered,
    require_known,
    split_by_name,
    values_in_order,
)
from knnper.data.examples import DataFormat, Dataset, InputSpec, LabelledArrays
from knnper.data.site_data import (
    ArrayInputs,
    Collected,
    SiteSettings,
    SiteTask,
    place_of,
    split_texts,
)
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, ProperFraction, alternatives

_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".tsv", ".txt")

# What pandas and NumPy write where a number is missing.
_NOT_A_NUMBER = ("nan", "NaN")

_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = ("integer", "floating", "boolean", "decimal", "null")


@dataclass(frozen=True, eq=False)
class TableFile:
    """Some columns of a table, in memory."""

    path: Path
    texts: dict[str, tuple[str, ...]]  # an empty one where there is none
    number_columns: tuple[str, ...]
    numbers: NDArray[np.float64]

    def filled_texts(self, column: str) -> tuple[str, ...]:
        """Return the texts of a column, none of which is empty or ``nan``."""
        texts = self.texts[column]
        missing = ("", *_NOT_A_NUMBER)
        rows = [row for row, text in enumerate(texts, 1) if text in missing]
        if rows:
            found = texts[rows[0] - 1] or "nothing"
            raise DataError(
                f"{self.path}: {len(rows)} rows hold {found} in the column {column!r}, "
                f"the first of them is row {rows[0]}, counting from 1; fill them in, "
                "or leave the rows out"
            )
        return texts

    def row_names(self) -> tuple[str, ...]:
        """Return what rows without a name are called: their number, as in ``00012``."""
        return tuple(f"{row:05d}" for row in range(len(self.numbers)))


def read_table(
    path: Path,
    texts: Sequence[str | None],
    numbers: Sequence[str] | None = None,
    delimiter: str = ",",
) -> TableFile:
    """Return some columns of a CSV file with a header, or of a Parquet file.

    ``texts`` and ``numbers`` name them; None instead of ``numbers`` is all others.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give a CSV or Parquet file")
    arrow = _arrow("lib")
    as_text = tuple(dict.fromkeys(name for name in texts if name is not None))
    schema_of, read = _reader(path, delimiter)
    try:
        columns = _number_columns(schema_of(), as_text, numbers, path)
        table = read(as_text, columns)
        found = {name: _texts(table, name) for name in as_text}
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    return TableFile(path, found, columns, _numbers(table, columns, path))


_Names = tuple[str, ...]


def _reader(
    path: Path, delimiter: str
) -> tuple[Callable[[], Any], Callable[[_Names, _Names], Any]]:
    """Return what reads names and types of a file's columns, and what reads some."""
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        parquet = _arrow("parquet")

        def some(texts: _Names, numbers: _Names) -> Any:
            columns = [*texts, *numbers]
            return parquet.read_table(path, columns=columns, use_threads=False)

        return lambda: parquet.read_schema(path), some
    if suffix not in _CSV:
        raise DataError(
            f"{path}: found the suffix {suffix!r}, expected one of "
            f"{', '.join((*_CSV, *_PARQUET))}"
        )
    if len(delimiter) != 1:
        raise DataError(
            f"{path}: found the delimiter {delimiter!r}, expected one character"
        )
    csv = _arrow("csv")
    reading = csv.ReadOptions(use_threads=False)
    parsing = csv.ParseOptions(delimiter=delimiter)

    def schema() -> Any:
        with csv.open_csv(path, reading, parsing) as reader:
            return reader.schema

    def read(texts: _Names, numbers: _Names) -> Any:
        # A guess would make the number 1 of the text "01".
        types = dict.fromkeys(texts, _arrow("lib").string())
        columns = [*texts, *numbers]
        convert = csv.ConvertOptions(column_types=types, include_columns=columns)
        return csv.read_csv(path, reading, parsing, convert)

    return schema, read


def _number_columns(
    schema: Any, texts: _Names, chosen: Sequence[str] | None, path: Path
) -> _Names:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has more than one column {twice[0]!r}; rename one")
    rest = (name for name in schema.names if name not in texts)
    numbers = tuple(rest if chosen is None else chosen)
    for name, count in Counter((*texts, *numbers)).items():
        if name not in schema.names:
            known = alternatives(name, schema.names)
            raise DataError(f"{path} has no column {name!r}; {known}")
        if count > 1:
            raise DataError(
                f"{path}: found the column {name!r} more than once among the features, "
                "or as a feature that has another meaning too, such as the label; take "
                "it out of data.features"
            )
    if not numbers:
        raise DataError(f"{path} has no columns of features; expected at least one")
    is_a = [getattr(_arrow("types"), f"is_{kind}") for kind in _NUMBERS]
    types = {name: schema.field(name).type for name in numbers}
    other = [
        f"{name} ({kind})"
        for name, kind in types.items()
        if not any(check(kind) for check in is_a)
    ]
    if other:
        raise DataError(
            f"{path}: features must be numbers, found the columns {', '.join(other)}; "
            "list the columns to use (data.features), or turn these into numbers"
        )
    return numbers


def _texts(table: Any, name: str) -> tuple[str, ...]:
    column = table.column(name)
    is_real = _arrow("types").is_floating(column.type)
    # Where numbers are expected, this one is what Parquet has in place of none.
    missing = (None, "nan") if is_real else (None,)
    texts = column.cast(_arrow("lib").string()).to_pylist()
    return tuple("" if text in missing else text for text in texts)


def _numbers(table: Any, names: Sequence[str], path: Path) -> NDArray[np.float64]:
    numbers = np.empty((table.num_rows, len(names)), dtype=np.float64)
    arrow = _arrow("lib")
    for place, name in enumerate(names):
        column = table.column(name)
        try:
            # Safe, whole numbers above 2**53 would be refused; here they are rounded.
            numbers[:, place] = column.cast(arrow.float64(), safe=False).to_numpy()
        except arrow.ArrowException as error:
            # Its type was guessed from its beginning.
            found = _first_that_is_none(column) or f"what is no number ({error})"
            raise DataError(
                f"{path}: features must be numbers, found {found} in the column "
                f"{name!r}; correct it, leave the row out, or list other columns "
                "(data.features)"
            ) from error
    # So written, it is true of NaN as well.
    unfit = (~(np.abs(numbers) <= _LARGEST)).sum(axis=0)
    if unfit.any():
        pairs = zip(names, unfit, strict=True)
        found = ", ".join(f"{name} {count}" for name, count in pairs if count)
        raise DataError(
            f"{path}: values are missing, not finite or too large for float32, in "
            f"{int((unfit > 0).sum())} columns ({found}); fill them in, leave the rows "
            "out, or list other columns (data.features)"
        )
    return numbers


def _first_that_is_none(column: Any) -> str | None:
    """Return the first value that is no number, and its row, in words."""
    missing = {None, *_arrow("csv").ConvertOptions().null_values}
    for row, value in enumerate(column.to_pylist(), 1):
        try:
            float("0" if value in missing else value)
        except (TypeError, ValueError):
            return f"{value!r} in row {row}, counting from 1,"
    return None


def _arrow(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ModuleNotFoundError as error:
        raise DataError(
            "reading tables needs the package pyarrow, which is not installed; "
            "pip install 'knnper[tables]'"
        ) from error


_LOG = logging.getLogger(__name__)

# Of float32, relative to a value; fewer of them in a deviation are too coarse.
_STEP = 2.0**-23

_FEWEST_STEPS = 100


@dataclass(frozen=True)
class TableSettings(DataFormat):
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

    name = "table"
    title = "Table"
    summary = "your own rows of features: CSV or Parquet files, a column a feature"

    train: str
    label: str
    test: str | None = None
    features: tuple[str, ...] | None = None
    id: str | None = None
    client: str | None = None
    test_fraction: ProperFraction = 0.2
    seed: NonNegativeInt = 0
    delimiter: Annotated[str, Field(min_length=1)] = ","

    def load(self) -> Dataset:
        """Return the rows as inputs of shape (1, 1, d), float32.

        The classes are those of the training rows, in the order of their names, or of
        their numbers where all are whole numbers. A `DataError` says what is wrong with
        the files, or that test rows have labels that no training row has.
        """
        train, table = _read(self, self.train, self.features)
        if self.test is None:
            is_test = _tested(train, table, self)
            train, test = train.taken(~is_test), train.taken(is_test)
        else:
            test, _ = _read(self, self.test, table.number_columns)
        _require_rows(train, test, self)
        class_names = values_in_order(train.labels)
        require_known(test.labels, class_names, self.test or self.train)
        parts = [rows.clients for rows in (train, test) if rows.clients is not None]
        owners = values_in_order(name for part in parts for name in part)
        # A feature that never varies has a deviation of 1.
        constant = np.ptp(train.numbers, axis=0) == 0
        std = tuple(np.where(constant, 1.0, train.numbers.std(axis=0)).tolist())
        mean = tuple(train.numbers.mean(axis=0).tolist())
        _warn_of_coarse(table, train.numbers)
        return Dataset(
            name="table",
            train=_labelled(train, class_names, owners),
            test=_labelled(test, class_names, owners),
            spec=InputSpec((1, 1, len(std)), len(class_names), mean, std, "float32"),
            class_names=class_names,
            feature_names=table.number_columns,
        )


class _Rows(NamedTuple):
    """Rows of one split: float64 (n, d), and n texts each."""

    numbers: NDArray[np.float64]
    labels: NDArray[np.object_]
    clients: NDArray[np.object_] | None

    def taken(self, chosen: NDArray[np.bool_]) -> "_Rows":
        clients = None if self.clients is None else self.clients[chosen]
        return _Rows(self.numbers[chosen], self.labels[chosen], clients)


def _read(
    settings: TableSettings, file: str, features: tuple[str, ...] | None
) -> tuple[_Rows, TableFile]:
    texts = (settings.label, settings.id, settings.client)
    path = Path(file).expanduser().absolute()
    table = read_table(path, texts, features, settings.delimiter)
    labels = np.array(table.filled_texts(settings.label), dtype=object)
    clients = None
    if settings.client is not None:
        clients = np.array(table.filled_texts(settings.client), dtype=object)
    return _Rows(table.numbers, labels, clients), table


def _tested(
    rows: _Rows, table: TableFile, settings: TableSettings
) -> NDArray[np.bool_]:
    """Mark the rows that are tested on where there is no file of them, shape (n,)."""
    names = table.row_names()
    if settings.id is not None:
        names = table.filled_texts(settings.id)
    fraction, seed = settings.test_fraction, settings.seed
    if rows.clients is None:
        splits = split_by_name(names, FractionSettings(0.0, fraction, seed))
        return np.array([split == "test" for split in splits], dtype=bool)
    # Of each client's rows, those with some of the names that it has.
    dividing = DividingSettings(test_fraction=fraction, seed=seed)
    pairs = list(zip(rows.clients.tolist(), names, strict=True))
    names_of = defaultdict[str, set[str]](set)
    for client, name in pairs:
        names_of[client].add(name)
    tested = set[tuple[str, str]]()
    for client, own in names_of.items():
        marks = mark_tested(len(own), client, dividing).tolist()
        marked = zip(sorted(own), marks, strict=True)
        tested.update((client, name) for name, is_test in marked if is_test)
    return np.array([pair in tested for pair in pairs], dtype=bool)


def _require_rows(train: _Rows, test: _Rows, settings: TableSettings) -> None:
    if not len(train.labels):
        raise DataError(f"{settings.train}: there are no training rows; add some")
    if len(test.labels):
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


def _labelled(
    rows: _Rows, class_names: Sequence[str], owners: Sequence[str]
) -> LabelledArrays:
    count, width = rows.numbers.shape
    return LabelledArrays(
        images=rows.numbers.astype(np.float32).reshape(count, 1, 1, width),
        labels=numbered(rows.labels, class_names),
        client_ids=None if rows.clients is None else numbered(rows.clients, owners),
    )


def _warn_of_coarse(table: TableFile, numbers: NDArray[np.float64]) -> None:
    """Say which features float32 holds too coarsely, such as times since 1970."""
    step = _STEP * np.abs(numbers.mean(axis=0))
    varies = np.ptp(numbers, axis=0) > 0
    is_coarse = varies & (numbers.std(axis=0) < _FEWEST_STEPS * step)
    if is_coarse.any():
        columns = [table.number_columns[at] for at in np.flatnonzero(is_coarse)]
        _LOG.warning(
            "%s: values of %s are so large, and differ so little, that float32 loses "
            "their differences; subtract an offset from these columns, such as their "
            "least value, in all files",
            table.path,
            ", ".join(columns),
        )


@dataclass(frozen=True)
class SiteTableSettings(SiteSettings):
    """Which file, and what its columns mean.

    Attributes
    ----------
    path
        A CSV file with a header, or a Parquet file.
    label
        The column of labels: names of classes, or whole numbers.
    features
        The columns of features in the federation's order; null is those that the
        federation agreed on by name or, where it did not, all other columns.
    id
        The column of the examples' names; null names them by their row.
    split
        The column that says train, validation or test; null splits by `fractions`.
    delimiter
        Between the columns of a CSV file.
    """

    name = "table"
    title = "Table"
    summary = "a CSV or Parquet file: a row an example, a column a feature"

    path: str
    label: str
    features: tuple[str, ...] | None = None
    id: str | None = None
    split: str | None = None
    delimiter: Annotated[str, Field(min_length=1)] = ","

    def collect(self, base: Path, task: SiteTask | None) -> Collected:
        """Return the examples in a table."""
        texts = (self.label, self.id, self.split)
        features = self.features
        if features is None and task is not None:
            features = task.feature_names or None
        path = place_of(base, self.path)
        table = read_table(path, texts, features, self.delimiter)
        source = str(path)
        labels = table.filled_texts(self.label)
        splits = None
        if self.split is not None:
            splits = split_texts(table.texts[self.split], source)
        return Collected(
            source=source,
            names=table.row_names() if self.id is None else table.texts[self.id],
            labels=labels,
            inputs=ArrayInputs(source, table.numbers),
            splits=splits,
            given_splits=frozenset(splits or ()),
            numbered=are_whole_numbers(labels),
        )
