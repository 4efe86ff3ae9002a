"""Feature columns: names, order, index columns of pandas, and precision in float32."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.data.dividing import clean_name, clean_names
from knnper.errors import DataError, warn_once
from knnper.reasons import Code, SafeReason
from knnper.settings import alternatives

_LOG = logging.getLogger(__name__)

# Names that DataFrame.to_csv and to_parquet give to an unnamed index, and "Unnamed: 0",
# as read_csv then calls it.
_INDEX_NAME = re.compile(r"|__index_level_\d+__|Unnamed: \d+(_level_\d+)?(\.\d+)?")
_ROW_NAMES = frozenset(("id", "idx", "index", "level_0", "row", "row_id"))
_FEWEST_ROWS = 10

# Relative step of float32; a feature with fewer steps per deviation is too coarse.
_STEP = 2.0**-23
_FEWEST_STEPS = 100

_MOST_SHOWN = 10
_COLUMNS_AT_ONCE = 64


def pandas_index(metadata: Any) -> frozenset[str]:
    """Return the index columns named in the pandas metadata of an Arrow schema.

    ``metadata`` is a mapping of bytes, or None.
    """
    try:
        columns = json.loads((metadata or {})[b"pandas"])["index_columns"]
        # A default index (0, 1, ...) is described by a mapping and has no column.
        return frozenset(name for name in columns if isinstance(name, str))
    except (KeyError, TypeError, ValueError):
        return frozenset()


def drop_index_columns(
    names: Sequence[str],
    index: frozenset[str],
    source: str,
    advice: str = "list the features (data.features) to use them",
) -> tuple[str, ...]:
    """Return the columns without those of a pandas index; log which are left out.

    ``index`` is the result of `pandas_index`.
    """
    is_index = [_INDEX_NAME.fullmatch(name) or name in index for name in names]
    left_out = [
        name for name, is_left_out in zip(names, is_index, strict=True) if is_left_out
    ]
    if left_out:
        shown = (repr(name) if name else "without a name" for name in left_out)
        warn_once(
            _LOG,
            f"{source}: the columns {', '.join(shown)} seem to be the index of a "
            f"pandas table and are not used as features; {advice}",
        )
    return tuple(name for name in names if name not in left_out)


def clean_features(names: Sequence[str]) -> tuple[str, ...]:
    """Normalise each name with `clean_name`, unless some would become equal."""
    clean = clean_names(names)
    return clean if len(set(clean)) == len(names) else tuple(names)


def order_by_name(
    names: Sequence[str], agreed: Sequence[str], source: str
) -> list[int]:
    """Return the position in ``names`` of each of the ``agreed`` features."""
    position_of = {clean_name(name): at for at, name in enumerate(names)}
    position_of |= {name: at for at, name in enumerate(names)}
    positions: list[int] = []
    for name in agreed:
        position = position_of.get(name, position_of.get(clean_name(name)))
        if position is None:
            raise DataError(
                f"{source} has no feature {name!r}, which the federation agreed on; "
                f"{alternatives(name, names)}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )
        positions.append(position)
    return positions


def default_feature_names(count: int) -> tuple[str, ...]:
    """Return names for messages about features without names."""
    return tuple(f"feature {number}" for number in range(count))


def require_order(names: Sequence[str], agreed: Sequence[str], source: str) -> None:
    """Raise if a site lists a feature of the federation at another position.

    Columns are matched by position. Names that the federation does not have may stand
    anywhere.

    A list of another length is reported by the check of the inputs' shape.
    """
    if len(names) != len(agreed):
        return
    position_of = {name: at for at, name in enumerate(agreed)}
    for at, name in enumerate(names):
        if position_of.get(name, at) != at:
            raise DataError(
                f"{source}: data.features has {name!r} at position {at + 1}, where the "
                f"federation has it at position {position_of[name] + 1}; leave out "
                "data.features to find the columns by their names, or list them in the "
                f"federation's order: {listed(agreed)}",
                reason=SafeReason(Code.WRONG_COLUMNS),
            )


def warn_of_row_numbers(
    numbers: NDArray[Any], names: Sequence[str], source: str
) -> None:
    """Log which features (n, d) count the rows, like an index."""
    columns = [
        name
        for name, column in zip(names, numbers.T, strict=True)
        if len(column) >= _FEWEST_ROWS and _numbers_rows(column, name)
    ]
    if columns:
        warn_once(
            _LOG,
            f"{source}: the columns {listed(columns)} number the rows, and are used "
            "as features; leave them out if they do not help to predict the label",
        )


def _numbers_rows(values: NDArray[Any], name: str) -> bool:
    """Return whether a column holds distinct whole numbers without a gap.

    Under a name in `_ROW_NAMES` it may have gaps.
    """
    column = values.astype(np.float64)
    span = column.max() - column.min()
    if span != len(column) - 1 and name.casefold() not in _ROW_NAMES:
        return False
    is_whole = (column == np.floor(column)).all()
    return bool(is_whole) and len(np.unique(column)) == len(column)


def warn_of_coarse(numbers: NDArray[Any], names: Sequence[str], source: str) -> None:
    """Log which features (n, d) lose their differences in float32, such as times."""
    columns = [names[at] for at in _coarse(numbers)]
    if columns:
        warn_once(
            _LOG,
            f"{source}: the values of {listed(columns)} are large and differ little, "
            "so float32 loses their differences; subtract an offset from these "
            "columns, such as their minimum, in all files",
        )


def _coarse(numbers: NDArray[Any]) -> Iterator[int]:
    if not len(numbers):
        return
    for start in range(0, numbers.shape[1], _COLUMNS_AT_ONCE):
        some = numbers[:, start : start + _COLUMNS_AT_ONCE].astype(np.float64)
        step = _STEP * np.abs(some.mean(axis=0))
        varies = np.ptp(some, axis=0) > 0
        is_coarse = varies & (some.std(axis=0) < _FEWEST_STEPS * step)
        yield from (start + np.flatnonzero(is_coarse)).tolist()


def listed(names: Sequence[str], most: int = _MOST_SHOWN) -> str:
    """Format the first ``most`` names, and the number of all if there are more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)})"
