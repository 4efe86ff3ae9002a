"""A table in a CSV or Parquet file: texts and numbers by column."""

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.config.suggestions import alternatives

_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".tsv", ".txt")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
# What pandas and NumPy write where a number is missing.
_NOT_A_NUMBER = ("nan", "NaN")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are read.

    Attributes
    ----------
    texts
        Those read as text.
    numbers
        Those read as numbers, in this order; None is all that are not `texts`, in the
        order of the file.
    """

    texts: tuple[str, ...]
    numbers: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class TableFile:
    """Some columns of a table, in memory.

    Attributes
    ----------
    path
        The file.
    texts
        By column, n texts; an empty one where there is none.
    number_columns
        The d columns of `numbers`.
    numbers
        Float64 that float32 can hold, shape (n, d).
    """

    path: Path
    texts: dict[str, tuple[str, ...]]
    number_columns: tuple[str, ...]
    numbers: NDArray[np.float64]

    def filled_texts(self, column: str) -> tuple[str, ...]:
        """Return the texts of a column, none of which is empty or ``nan``.

        Raises
        ------
        DataError
            With the number of those that are, and the first row.
        """
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


def row_names(table: TableFile) -> tuple[str, ...]:
    """Return what rows without a name are called: their number, as in ``00012``."""
    return tuple(f"{row:05d}" for row in range(len(table.numbers)))


def are_whole_numbers(values: Iterable[str]) -> bool:
    """Return whether all of ``values`` are written as whole numbers."""
    return all(map(_WHOLE_NUMBER.fullmatch, values))


def values_in_order(values: Iterable[str]) -> tuple[str, ...]:
    """Return the different values, sorted; as numbers where all are whole numbers."""
    different = set(values)
    if are_whole_numbers(different):
        return tuple(sorted(different, key=lambda value: (int(value), value)))
    return tuple(sorted(different))


def read_table(path: Path, columns: Columns, delimiter: str = ",") -> TableFile:
    """Return some columns of a CSV file with a header, or of a Parquet file.

    Parameters
    ----------
    path
        Ends in .csv, .tsv or .txt, or in .parquet or .pq.
    columns
        Which.
    delimiter
        Between the columns of a CSV file.

    Raises
    ------
    DataError
        If the file cannot be read, columns are missing or occur twice, are no numbers
        where numbers are expected, or lack values there (with all counts) or have some
        that are too large for float32; or if the package pyarrow is not installed.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give a CSV or Parquet file")
    arrow = _arrow("lib")
    source = _source_of(path, delimiter)
    try:
        numbers = _number_columns(source.schema(), columns, path)
        table = source.read(columns.texts, numbers)
        texts = {name: _texts(table, name) for name in columns.texts}
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    return TableFile(path, texts, numbers, _numbers(table, numbers, path))


class _CsvSource:
    def __init__(self, path: Path, delimiter: str) -> None:
        self._csv, self._path = _arrow("csv"), path
        self._options = {
            "read_options": self._csv.ReadOptions(use_threads=False),
            "parse_options": self._csv.ParseOptions(delimiter=delimiter),
        }

    def schema(self) -> Any:
        """Return names and types, as the beginning of the file suggests them."""
        with self._csv.open_csv(self._path, **self._options) as reader:
            return reader.schema

    def read(self, texts: Sequence[str], numbers: Sequence[str]) -> Any:
        # A guess would make the number 1 of the text "01".
        types = dict.fromkeys(texts, _arrow("lib").string())
        convert = self._csv.ConvertOptions(
            column_types=types, include_columns=[*texts, *numbers]
        )
        return self._csv.read_csv(self._path, convert_options=convert, **self._options)


class _ParquetSource:
    def __init__(self, path: Path) -> None:
        self._parquet, self._path = _arrow("parquet"), path

    def schema(self) -> Any:
        return self._parquet.read_schema(self._path)

    def read(self, texts: Sequence[str], numbers: Sequence[str]) -> Any:
        return self._parquet.read_table(
            self._path, columns=[*texts, *numbers], use_threads=False
        )


def _source_of(path: Path, delimiter: str) -> _CsvSource | _ParquetSource:
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        return _ParquetSource(path)
    if suffix in _CSV:
        if len(delimiter) != 1:
            raise DataError(
                f"{path}: found the delimiter {delimiter!r}, expected one character"
            )
        return _CsvSource(path, delimiter)
    raise DataError(
        f"{path}: found the suffix {suffix!r}, expected one of "
        f"{', '.join((*_CSV, *_PARQUET))}"
    )


def _number_columns(schema: Any, columns: Columns, path: Path) -> tuple[str, ...]:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has more than one column {twice[0]!r}; rename one")
    rest = tuple(name for name in schema.names if name not in columns.texts)
    numbers = rest if columns.numbers is None else columns.numbers
    named = (*columns.texts, *numbers)
    for name, count in Counter(named).items():
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
    other = [name for name in numbers if not _is_number(schema.field(name).type)]
    if other:
        found = ", ".join(f"{name} ({schema.field(name).type})" for name in other)
        raise DataError(
            f"{path}: features must be numbers, found the columns {found}; list the "
            "columns to use (data.features), or turn these into numbers"
        )
    return numbers


def _is_number(kind: Any) -> bool:
    types = _arrow("types")
    checks = ("integer", "floating", "boolean", "decimal", "null")
    return any(getattr(types, f"is_{check}")(kind) for check in checks)


def _texts(table: Any, name: str) -> tuple[str, ...]:
    column = table.column(name)
    is_real = _arrow("types").is_floating(column.type)
    # Where numbers are expected, this one is what Parquet has in place of none.
    missing = (None, "nan") if is_real else (None,)
    texts = column.cast(_arrow("lib").string()).to_pylist()
    return tuple("" if text in missing else text for text in texts)


def _numbers(table: Any, names: Sequence[str], path: Path) -> NDArray[np.float64]:
    numbers = np.empty((table.num_rows, len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        numbers[:, place] = _as_numbers(table.column(name), name, path)
    # So written, it is true of NaN as well.
    unfit = (~(np.abs(numbers) <= _LARGEST)).sum(axis=0)
    if unfit.any():
        found = ", ".join(
            f"{name} {count}" for name, count in zip(names, unfit, strict=True) if count
        )
        raise DataError(
            f"{path}: values are missing, not finite or too large for float32, in "
            f"{int((unfit > 0).sum())} columns ({found}); fill them in, leave the rows "
            "out, or list other columns (data.features)"
        )
    return numbers


def _as_numbers(column: Any, name: str, path: Path) -> NDArray[np.float64]:
    """Return a column as numbers, whose type was guessed from its beginning."""
    arrow = _arrow("lib")
    try:
        # Safe, whole numbers above 2**53 would be refused; here they are rounded.
        numbers = column.cast(arrow.float64(), safe=False)
    except arrow.ArrowException as error:
        found = _first_that_is_none(column) or f"what is no number ({error})"
        raise DataError(
            f"{path}: features must be numbers, found {found} in the column {name!r}; "
            "correct it, leave the row out, or list other columns (data.features)"
        ) from error
    values: NDArray[np.float64] = numbers.to_numpy()
    return values


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
