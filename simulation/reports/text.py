"""Text from runs and users, made safe for tables, charts and pages.

Names may come from elsewhere: each stays one line, one cell, and no formula.
"""

import json
import unicodedata
from typing import Any

# Unicode categories of controls, unpaired surrogates, and line and paragraph ends.
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")
_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Replace controls, line ends and characters that XML forbids by spaces."""
    return "".join(
        " "
        if unicodedata.category(character) in _NO_TEXT or character in _NOT_IN_XML
        else character
        for character in text
    )


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as part of a line of Markdown, without any HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def percent(fraction: float) -> str:
    """Format a fraction of 1 in percent with one digit."""
    return f"{100 * fraction:.1f} %"


def as_text(value: Any) -> str:
    """Format the value of a setting for tables."""
    return value if isinstance(value, str) else json.dumps(value)
