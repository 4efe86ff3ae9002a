"""Names that come from outside, as class names and titles do, in charts and tables."""

import unicodedata

_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode: control characters, halves of characters, ends of lines."""


_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Return a text with a space for each character that is none, or ends a line."""
    return "".join(" " if _is_no_text(one) else one for one in text)


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as a part of a line of Markdown, in which it is no HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def _is_no_text(character: str) -> bool:
    return unicodedata.category(character) in _NO_TEXT or character in _NOT_IN_XML
