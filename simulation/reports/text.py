"""Text from runs and users, made safe for tables, charts and pages."""

import json
import unicodedata
from typing import Any

_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # of Unicode: controls, half characters, line ends
_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Return a text with a space for each character that is none, or ends a line."""
    return "".join(
        " " if unicodedata.category(one) in _NO_TEXT or one in _NOT_IN_XML else one
        for one in text
    )


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as a part of a line of Markdown, in which it is no HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def percent(fraction: float) -> str:
    """Return a fraction of 1 in percent, with one digit."""
    return f"{100 * fraction:.1f} %"


def as_text(value: Any) -> str:
    """Return the value of a setting as tables have it."""
    return value if isinstance(value, str) else json.dumps(value)
