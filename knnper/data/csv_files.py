"""Diagnose CSV files that cannot be read: encoding, delimiter, quotes, row length."""

import codecs
import csv
import re
from pathlib import Path

from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

DELIMITERS = ",;\t|"

_QUOTED = re.compile(r'"[^"]*"')
_QUOTE = b'"'
_PART = 2**20
_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_BEGINNING = 4096

# UTF-32 first: its little-endian mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def encoding_problem(path: Path) -> str | None:
    """Describe the encoding of a text file that is not UTF-8; else return None."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
        for mark, encoding in _MARKS.items():
            if beginning.startswith(mark):
                return f"it is encoded in {encoding}, expected UTF-8"
        # In UTF-16, every second byte of Latin letters is 0.
        if beginning.count(0) > len(beginning) / 4:
            return "it is encoded in UTF-16, or is not a text; expected UTF-8"
        file.seek(0)
        for line, content in enumerate(file, 1):
            try:
                content.decode()
            except UnicodeDecodeError:
                return (
                    f"line {line} has another encoding, perhaps Windows-1252 or "
                    "Latin-1; expected UTF-8"
                )
    return None


def unclosed_quote(path: Path, delimiter: str) -> int | None:
    """Return the line of the row with a quote that is never closed, or None.

    Readers would take all following lines for one value.
    """
    with path.open("rb") as file:
        # Quotes come in pairs, also within values.
        parts = iter(lambda: file.read(_PART), b"")
        if sum(part.count(_QUOTE) for part in parts) % 2 == 0:
            return None
    with path.open(encoding="utf-8", errors="replace", newline="") as text:
        rows, line = csv.reader(text, delimiter=delimiter, strict=True), 1
        try:
            for _ in rows:
                line = rows.line_num + 1
        except csv.Error:
            return line
    return None


def header_of(path: Path) -> str:
    """Return the first line of a text file, without the line break."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.readline().rstrip("\n")


def other_delimiter(header: str, delimiter: str) -> str | None:
    """Guess the delimiter of a header that does not contain ``delimiter``."""
    unquoted = _QUOTED.sub("", header)
    if delimiter in unquoted:
        return None
    commonest = max(DELIMITERS, key=unquoted.count)
    return commonest if commonest in unquoted else None


def csv_problem(path: Path, delimiter: str, advice: str) -> str | None:
    """Describe a problem of encoding, delimiter or quotes, or return None.

    ``advice`` is the fix for another delimiter, with the placeholder ``{!r}`` for it.
    """
    problem = encoding_problem(path)
    if problem is not None:
        return f"{problem}; save it in UTF-8 (in Excel: CSV UTF-8)"
    header = header_of(path)
    if header.lower().startswith("sep="):
        return f"its first line is {header!r}, which only Excel understands; remove it"
    other = other_delimiter(header, delimiter)
    if other is not None:
        return (
            f"its header has {other!r} between the columns, expected {delimiter!r}; "
            f"{advice.format(other)}"
        )
    return quote_problem(path, delimiter)


def quote_problem(path: Path, delimiter: str) -> str | None:
    """Describe a quote that is not closed, or return None."""
    line = unclosed_quote(path, delimiter)
    if line is None:
        return None
    return (
        f"a quote in the row from line {line} on is not closed, so that all following "
        "lines are one value; close the quote, or double it if it belongs to the value"
    )


def row_error(path: Path, message: str) -> DataError | None:
    """Turn Arrow's error about a row of the wrong length into a short one, else None.

    ``message`` is the text of Arrow's error, which contains the whole row.
    """
    match = _ROW.search(message)
    if match is None:
        return None
    row, expected, count = map(int, match.groups())
    return DataError(
        f"{path} cannot be read as a table: row {row - 1}, counting from 1 below the "
        f"header, has {count} values, expected {expected}; correct it, and quote "
        "values that hold the delimiter",
        reason=SafeReason(Code.UNREADABLE_ROW, row=row),
    )
