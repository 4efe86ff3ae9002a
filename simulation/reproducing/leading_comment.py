"""What a file says about itself at its top."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LISTING_INDENT = "  "
_LONGEST_TITLE = 140
"""In characters: two lines of a page."""


@dataclass(frozen=True)
class Paragraph:
    """Some lines of a comment that belong together.

    Attributes
    ----------
    text
        Without the signs of the comment; the lines of a listing stay lines.
    is_listing
        Whether it is to be shown as it is: its lines are indented.
    """

    text: str
    is_listing: bool


def leading_comment(text: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of the comment with which a YAML file begins."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[1:].removeprefix(" ").rstrip() for line in comment]
    grouped = itertools.groupby(lines, lambda line: (not line, _is_indented(line)))
    return tuple(
        _paragraph(list(group), is_listing=is_listing)
        for (is_blank, is_listing), group in grouped
        if not is_blank
    )


def split_title(comment: Sequence[Paragraph]) -> tuple[str, Sequence[Paragraph]]:
    """Return the sentence that says what a file is, and the paragraphs after it.

    A first paragraph of one short sentence is one; without it the title is empty.
    """
    if not comment or comment[0].is_listing:
        return "", comment
    text = comment[0].text
    title = text.rstrip(".:")
    if len(title) > _LONGEST_TITLE or ". " in title:
        return "", comment
    return title, comment[1:]


def _is_indented(line: str) -> bool:
    return line.startswith(_LISTING_INDENT)


def _paragraph(lines: list[str], *, is_listing: bool) -> Paragraph:
    parts: Iterator[str] = (line.strip() for line in lines)
    return Paragraph(("\n" if is_listing else " ").join(parts), is_listing)
