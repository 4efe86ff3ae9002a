"""Read the columns of Arrow tables as texts, features and files."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.data.dividing import clean_name, clean_names
from knnper.data.features import (
    clean_features,
    drop_index_columns,
    pandas_index,
    warn_of_row_numbers,
)
from knnper.errors import DataError
from knnper.process import import_extra
from knnper.reasons import Code, SafeReason
from knnper.settings import alternatives

# Text of a missing number in files of pandas and NumPy.
_NOT_A_NUMBER = ("nan", "NaN")
_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = ("integer", "floating", "boolean", "decimal", "null")
_CONTENTS = ("string", "large_string", "binary", "large_binary", "struct", "null")
# A position in a column of lists, such as vector[3].
_PLACE = re.compile(r"(.*)\[\d+\]", re.DOTALL)


@dataclass(frozen=True, eq=False)
class TableFile:
    """The selected columns of a table, in memory."""

    path: Path
    texts: dict[str, tuple[str, ...]]  # by column; "" for missing values
    number_columns: tuple[str, ...]
    feature_names: tuple[str, ...]  # one per feature; a column of lists has several
    numbers: NDArray[np.float64]  # (n, d)
    raw: Mapping[str, Any] = field(default_factory=dict)  # unconverted Arrow columns
    class_names: tuple[str, ...] = ()  # empty if the table does not declare them

    def filled_texts(self, column: str) -> tuple[str, ...]:
        """Return the texts of a column; raise if one is empty or ``nan``."""
        return self._filled(column, self.texts[column])

    def names(self, column: str) -> tuple[str, ...]:
        """Return the labels or clients in a column, normalised by `clean_name`."""
        return self._filled(column, clean_names(self.texts[column]))

    def _filled(self, column: str, texts: tuple[str, ...]) -> tuple[str, ...]:
        missing = ("", *_NOT_A_NUMBER)
        rows = [row for row, text in enumerate(texts) if text in missing]
        if rows:
            value = texts[rows[0]] or "nothing"
            row = rows[0]
            raise DataError(
                f"{self.path}: {len(rows)} rows hold {value} in the column {column!r}, "
                f"the first of them is row {row + 1}, counting from 1; fill them in, "
                "or leave the rows out",
                reason=SafeReason(Code.MISSING_VALUE, count=len(rows), row=row + 1),
            )
        return texts

    def join(self, other: "TableFile") -> "TableFile":
        """Append the rows of another split with the same columns."""
        chunked = arrow("lib").chunked_array
        return replace(
            self,
            path=self.path.with_name(f"{self.path.name}+{other.path.name}"),
            texts={name: self.texts[name] + other.texts[name] for name in self.texts},
            numbers=np.concatenate([self.numbers, other.numbers]),
            raw={
                name: chunked([*column.chunks, *other.raw[name].chunks])
                for name, column in self.raw.items()
            },
        )

    def row_names(self) -> tuple[str, ...]:
        """Return the default names of rows: their numbers, such as ``00012``."""
        return tuple(f"{row:05d}" for row in range(len(self.numbers)))


@dataclass(frozen=True)
class ColumnSelection:
    """The columns to read, by their use."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...] | None = None  # None: all columns without another use
    raw: tuple[str, ...] = ()  # without conversion, such as contents of files

    @classmethod
    def of(
        cls,
        texts: Sequence[str | None],
        numbers: Sequence[str] | None,
        raw: str | None = None,
    ) -> "ColumnSelection":
        """Build a selection; names that are None are left out."""
        named = tuple(dict.fromkeys(name for name in texts if name is not None))
        chosen = None if numbers is None else tuple(numbers)
        return cls(named, chosen, () if raw is None else (raw,))

    @property
    def other_columns(self) -> tuple[str, ...]:
        """The columns that are not features."""
        return (*self.texts, *self.raw)

    def columns_in(self, schema: Any) -> tuple[str, ...]:
        """Return the names in the table of the columns that are not features."""
        return tuple(map(_column_finder(schema), self.other_columns))


def arrow(module: str) -> Any:
    """Import a module of pyarrow."""
    return import_extra(f"pyarrow.{module}", "tables", "reading tables")


def extract_columns(
    table: Any, selection: ColumnSelection, numbers: tuple[str, ...], path: Path
) -> TableFile:
    """Extract the selected columns of an Arrow table; see `select_number_columns`."""
    find = _column_finder(table.schema)
    texts = {
        name: _column_texts(table.column(find(name)), name, path)
        for name in selection.texts
    }
    raw = {name: table.column(find(name)) for name in selection.raw}
    for name, column in raw.items():
        _require_contents(column.type, name, path)
    parts = {name: _split_lists(table.column(name), name, path) for name in numbers}
    columns: dict[str, Any] = {}
    for name in numbers if selection.numbers is None else selection.numbers:
        scalars = parts[find(name)]
        if name in scalars:
            columns[name] = scalars[name]
        elif clean_name(name) == clean_name(find(name)):
            columns |= scalars
        else:
            raise DataError(
                f"{path} has no feature {name!r}; {alternatives(name, scalars)}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
    values = _column_numbers(columns, table.num_rows, path)
    names = clean_features(tuple(columns))
    if selection.numbers is None:
        warn_of_row_numbers(values, names, str(path))
    return TableFile(path, texts, selection.numbers or numbers, names, values, raw)


def select_number_columns(
    schema: Any,
    selection: ColumnSelection,
    path: Path,
    index: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Return the columns of features; raise if one is missing or not numeric.

    Columns of ``index`` and of a pandas index are features only if they are selected by
    name.
    """
    # Columns without a name are never read.
    counts = Counter(name for name in schema.names if name)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has more than one column {twice[0]!r}; rename one",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    find, known = _column_finder(schema), frozenset(schema.names)
    if selection.numbers is None:
        others = set(map(find, selection.other_columns))
        candidates = [name for name in schema.names if name not in others]
        numbers = drop_index_columns(
            candidates, index | pandas_index(schema.metadata), str(path)
        )
    else:
        numbers = selection.numbers
    for name, count in Counter((*selection.other_columns, *numbers)).items():
        if find(name) not in known:
            raise DataError(
                f"{path} has no column {name!r}; {alternatives(name, schema.names)}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
        if count > 1:
            raise DataError(
                f"{path}: found the column {name!r} more than once among the features, "
                "or as a feature that has another meaning too, such as the label; take "
                "it out of data.features",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
    if not numbers and selection.numbers is None:
        raise DataError(
            f"{path} has no columns of features; expected at least one",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    columns = tuple(dict.fromkeys(map(find, numbers)))
    _require_numbers(schema, columns, path)
    return columns


def _column_finder(schema: Any) -> Callable[[str], str]:
    """Return a function from a selected name to the name of the column in the table.

    Names may differ in white space and Unicode form, or denote a position in a column
    of lists, such as ``vector[3]``. Names without a column are returned unchanged.
    """
    known = frozenset(schema.names)
    clean = defaultdict[str, list[str]](list)
    for column in schema.names:
        clean[clean_name(column)].append(column)

    def find(name: str) -> str:
        if name in known:
            return name
        alike = clean[clean_name(name)]
        if len(alike) == 1:
            return alike[0]
        place = _PLACE.fullmatch(name)
        return name if place is None or place[1] not in known else place[1]

    return find


def _require_contents(kind: Any, name: str, path: Path) -> None:
    """Raise if a column cannot hold images: paths or contents of files."""
    if not is_any_type(kind, _CONTENTS):
        raise DataError(
            f"{path}: found {kind} in the column {name!r}, expected paths of image "
            "files, or files' contents (binary); save pixels as PNG files, or all "
            "images as an array in an .npz file (data.name: npz)",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )


def is_any_type(kind: Any, names: Sequence[str]) -> bool:
    """Test whether an Arrow type is one of ``names``, such as ``floating``."""
    types = arrow("types")
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _require_numbers(schema: Any, columns: Sequence[str], path: Path) -> None:
    types = {name: schema.field(name).type for name in columns}
    other = [
        f"{name} ({kind})"
        for name, kind in types.items()
        if not is_any_type(kind.value_type if _is_list(kind) else kind, _NUMBERS)
    ]
    if other:
        raise DataError(
            f"{path}: features must be numbers, found the columns {', '.join(other)}; "
            "list the columns to use (data.features), turn these into numbers (with a "
            "point, not a comma), or say that they hold images or texts (data.image, "
            "data.text)",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )


def _is_list(kind: Any) -> bool:
    types = arrow("types")
    return any(
        check(kind)
        for check in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )


def _split_lists(column: Any, name: str, path: Path) -> dict[str, Any]:
    """Return a column by name, or the columns of the positions in its lists."""
    if not _is_list(column.type):
        return {name: column}
    lengths = set(arrow("compute").list_value_length(column).to_pylist())
    if len(lengths) != 1 or not (length := lengths.pop()):
        raise DataError(
            f"{path}: found lists of different lengths, or no lists, in the column "
            f"{name!r}; expected the same number of features in each row",
            reason=SafeReason(Code.WRONG_COLUMNS),
        )
    flat = arrow("compute").list_flatten(column).to_numpy().reshape(-1, length)
    make = arrow("lib").array
    return {f"{name}[{at}]": make(flat[:, at]) for at in range(length)}


def _column_texts(column: Any, name: str, path: Path) -> tuple[str, ...]:
    is_real = arrow("types").is_floating(column.type)
    # In a column of floats, Parquet files of pandas hold nan for a missing value.
    missing = (None, "nan") if is_real else (None,)
    lib = arrow("lib")
    try:
        texts = column.cast(lib.string()).to_pylist()
    except lib.ArrowException as error:
        raise DataError(
            f"{path}: found {column.type} in the column {name!r}, expected a text (in "
            "UTF-8) or a number in each row",
            reason=SafeReason(Code.WRONG_COLUMNS),
        ) from error
    return tuple("" if text in missing else text for text in texts)


def _column_numbers(
    columns: Mapping[str, Any], num_rows: int, path: Path
) -> NDArray[np.float64]:
    numbers = np.empty((num_rows, len(columns)), dtype=np.float64)
    lib = arrow("lib")
    for place, (name, column) in enumerate(columns.items()):
        try:
            # safe=False rounds whole numbers above 2**53; safe=True would raise.
            numbers[:, place] = column.cast(lib.float64(), safe=False).to_numpy()
        except lib.ArrowException as error:
            # `_require_numbers` saw the type that Arrow guessed from the first rows of
            # a CSV file; a later row may hold a text.
            raise DataError(
                f"{path}: features must be numbers, found another value in the column "
                f"{name!r} ({error}); correct it, leave the row out, or list other "
                "columns (data.features)",
                reason=SafeReason(Code.NOT_A_NUMBER, feature=place + 1),
            ) from error
    # Negated, so that NaN counts as unfit.
    unfit = (~(np.abs(numbers) <= _LARGEST)).sum(axis=0)
    if unfit.any():
        pairs = zip(columns, unfit, strict=True)
        unfit_counts = ", ".join(f"{name} {count}" for name, count in pairs if count)
        raise DataError(
            f"{path}: values are missing, not finite or too large for float32, in "
            f"{int((unfit > 0).sum())} columns ({unfit_counts}); fill them in, leave "
            "the rows out, or list other columns (data.features)",
            reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=int(unfit.sum())),
        )
    return numbers
