"""CSV files of other encodings, delimiters and rows than are read."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from knnper.data.columns import ColumnSelection, TableFile
from knnper.data.csv_files import (
    csv_problem,
    encoding_problem,
    other_delimiter,
    unclosed_quote,
)
from knnper.data.tables import read_table
from knnper.errors import DataError

pytest.importorskip("pyarrow")

ROWS = "age,dose,kind\n1,2.5,ill\n2,3.5,well\n"
BLOCK = 2**20  # bytes that Arrow reads at once


def read(path: Path, content: str | bytes, delimiter: str = ",") -> TableFile:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_table(path, ColumnSelection.of(["kind"], ["age", "dose"]), delimiter)


@pytest.mark.parametrize("length", [10, BLOCK - 20, 3 * BLOCK])
def test_line_breaks_in_quotes(tmp_path: Path, length: int) -> None:
    # Wherever the blocks end, and in rows that are longer than one.
    note = f'"{"x" * length}\n\n{"y" * 100}"'
    rows = "".join(f"{row},{row / 2},{row % 2},{note}\n" for row in range(3))
    table = read(tmp_path / "a.csv", f"age,dose,kind,note\n{rows}")
    assert table.numbers.tolist() == [[0, 0], [1, 0.5], [2, 1]]
    assert table.texts["kind"] == ("0", "1", "0")


def test_line_breaks_where_a_block_ends(tmp_path: Path) -> None:
    rows = "".join(f'{row},1,f,"{"x" * 97}\n"\n' for row in range(15_000))
    assert len(rows) > BLOCK
    table = read(tmp_path / "a.csv", f"age,dose,kind,note\n{rows}")
    assert table.numbers[:, 0].tolist() == list(range(15_000))


def test_an_unclosed_quote_is_refused(tmp_path: Path) -> None:
    for torn in ('3,1,"ill\n', '"3,1,ill\n'):
        content = ROWS + torn + "4,1,well\n" * 3
        with pytest.raises(DataError, match=r"in the row from line 4 on is not closed"):
            read(tmp_path / "a.csv", content)
    # Within a value, a quote is a character as any other.
    table = read(tmp_path / "a.csv", ROWS + '3,1,5" pipe\n')
    assert table.texts["kind"][-1] == '5" pipe'


WELL_FORMED = st.lists(st.lists(st.text('a,"\n', max_size=4), min_size=2, max_size=3))


@settings(max_examples=100, deadline=None)
@given(WELL_FORMED, st.integers(0, 30))
@example([["a", '"\n'], ["", ""]], 0)
def test_the_line_of_an_unclosed_quote(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], before: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(rows)
    path.write_text(file.getvalue(), newline="")
    assert unclosed_quote(path, ",") is None
    first = file.getvalue().count("\n") + 1
    torn = "a,b" * before + ',"torn\n' + "a,b\n" * 3
    path.write_text(file.getvalue() + torn, newline="")
    assert unclosed_quote(path, ",") == first


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ";"), ("a.txt", "\t"), ("a.tsv", "|")]
)
def test_another_delimiter_is_named(tmp_path: Path, name: str, delimiter: str) -> None:
    path, content = tmp_path / name, ROWS.replace(",", delimiter)
    with pytest.raises(DataError) as caught:
        read(path, content)
    expected = f"{path} cannot be read as a table: its header has {delimiter!r} between"
    assert str(caught.value).startswith(expected)
    assert f"set data.delimiter: {delimiter!r}" in str(caught.value)
    assert len(read(path, content, delimiter).numbers) == 2
    with pytest.raises(DataError, match=r"header has ',' .* expected ';'; set data"):
        read(path, ROWS, ";")


def test_tabs_are_expected_by_the_suffix(tmp_path: Path) -> None:
    expected = read(tmp_path / "a.csv", ROWS)
    for content in (ROWS, ROWS.replace(",", "\t")):
        table = read(tmp_path / "a.tsv", content)
        assert table.numbers.tolist() == expected.numbers.tolist()
        assert table.texts == expected.texts


def test_a_delimiter_is_found_outside_of_quotes() -> None:
    assert other_delimiter('"a;b",c', ",") is None
    assert other_delimiter('"Temp, C";dose', ",") == ";"
    assert other_delimiter("alone", ",") is None


@pytest.mark.parametrize(
    ("encoding", "problem"),
    [
        ("utf-16", "it is encoded in UTF-16, expected UTF-8; save it"),
        ("utf-16-be", "it is encoded in UTF-16, or is not a text"),
        ("utf-32", "it is encoded in UTF-32"),
        ("latin-1", "line 2 has another encoding, perhaps Windows-1252 or Latin-1"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_another_encoding_is_named(
    tmp_path: Path, encoding: str, problem: str, suffix: str
) -> None:
    content = ROWS.replace("ill", "kränk").encode(encoding)
    with pytest.raises(DataError, match=f"cannot be read as a table: {problem}"):
        read(tmp_path / f"a{suffix}", content)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert len(read(path, ROWS.encode("utf-8-sig")).numbers) == 2
    assert encoding_problem(path) is None
    assert csv_problem(path, ",", "{!r}") is None


def test_a_line_for_excel_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="first line is 'sep=,', which only Excel"):
        read(tmp_path / "a.csv", f"sep=,\n{ROWS}")


@pytest.mark.parametrize(("row", "count"), [("3", 1), ("3,secret,words,1", 4)])
def test_a_row_of_another_length_is_not_shown(
    tmp_path: Path, row: str, count: int
) -> None:
    expected = (
        f"row 3, counting from 1 below the header, has {count} values, expected 3"
    )
    with pytest.raises(DataError, match=expected) as caught:
        read(tmp_path / "a.csv", f"{ROWS}{row}\n1,2,ill\n")
    assert "secret" not in str(caught.value)
