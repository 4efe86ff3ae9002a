"""Columns of tables, and what cannot be read as a number or as a label."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from knnper.data.tables import TableFile, read_table
from knnper.errors import DataError

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")
BEYOND = 2**53 + 1  # no float64 is this number


def read(path: Path, *numbers: str) -> TableFile:
    return read_table(path, ["y"], numbers or None)


def csv_of(folder: Path, text: str) -> Path:
    path = folder / "a.csv"
    path.write_text(text)
    return path


def parquet_of(folder: Path, **columns: Any) -> Path:
    path = folder / "a.parquet"
    parquet.write_table(arrow.table(columns), path)
    return path


def test_text_behind_the_part_that_types_are_guessed_from(tmp_path: Path) -> None:
    # The first empty one is missing, and not what is wrong.
    lines = [f"{row},1.25,{'f' * 20}" for row in range(60_000)]
    lines[59_000] = f",1.25,{'f' * 20}"
    path = csv_of(tmp_path, "\n".join(["a,b,y", *lines, "n.k.,1.25,f"]))
    assert path.stat().st_size > 1 << 20
    expected = r"found 'n\.k\.' in row 60001, counting from 1, in the column 'a'"
    with pytest.raises(DataError, match=expected):
        read(path)
    assert read(path, "b").numbers.shape == (60_001, 1)


def test_whole_numbers_that_no_float_is(tmp_path: Path) -> None:
    path = csv_of(tmp_path, f"a,y\n{BEYOND},f\n")
    assert read(path).numbers.tolist() == [[float(BEYOND)]]
    column = arrow.array([2**64 - 1], type=arrow.uint64())
    assert read(parquet_of(tmp_path, a=column, y=["f"])).numbers.tolist() == [[2.0**64]]


@pytest.mark.parametrize("features", [("a", "y"), ("a", "a")])
def test_a_column_has_one_meaning(tmp_path: Path, features: tuple[str, ...]) -> None:
    path = csv_of(tmp_path, "a,y\n1,2\n")
    with pytest.raises(DataError, match=f"'{features[1]}' more than once .*features"):
        read(path, *features)


@pytest.mark.parametrize("value", ["1e300", "-1e39", "inf", ""])
def test_values_that_float32_cannot_hold(tmp_path: Path, value: str) -> None:
    path = csv_of(tmp_path, f"a,b,y\n1,1,f\n{value},3e38,g\n")
    with pytest.raises(DataError, match=r"too large for float32, in 1 .*\(a 1\)"):
        read(path)


def test_a_label_that_is_no_number_is_missing(tmp_path: Path) -> None:
    nan = float("nan")
    for kind in (arrow.float32(), arrow.float64()):
        labels = arrow.array([0, 1, nan, None], type=kind)
        table = read(parquet_of(tmp_path, a=[1, 2, 3, 4], y=labels))
        assert table.texts["y"] == ("0", "1", "", "")
        with pytest.raises(DataError, match=r"2 rows hold nothing .* is row 3, count"):
            table.filled_texts("y")


@pytest.mark.parametrize("missing", ["nan", "NaN"])
def test_a_label_that_is_written_as_missing(tmp_path: Path, missing: str) -> None:
    table = read(csv_of(tmp_path, f"a,y\n1,0\n2,{missing}\n3,Nan\n"))
    with pytest.raises(DataError, match=f"1 rows hold {missing} .* is row 2, counting"):
        table.filled_texts("y")
