"""Names from outside stay one line, one cell, and no formula."""

import pytest
from matplotlib.figure import Figure

from knnper.simulation.reports.charts import wrapped
from knnper.simulation.reports.tables import (
    chart_text,
    markdown_cell,
    markdown_text,
    one_line,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, λ = 0.3", "plain, λ = 0.3"),
        ("a\nb\tc\x00d\x1be\x7f", "a b c d e "),
        ("a\u2028b\ud800c\uffffd", "a b c d"),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    assert one_line(text) == expected


def test_a_cell_of_markdown_stays_one() -> None:
    assert markdown_cell("a|b\r\nc") == r"a\|b  c"


def test_a_name_is_no_html_in_markdown() -> None:
    assert markdown_cell("<b>&amp;|") == r"&lt;b>&amp;amp;\|"
    assert markdown_text("<b>|\n") == "&lt;b>| "


@pytest.mark.parametrize("name", ["$x^$", "$a$ and $b_$", "10 $", r"\$", "$\\frac$"])
def test_no_name_is_a_formula(name: str) -> None:
    """A formula that matplotlib cannot read ends the drawing."""
    figure = Figure()
    text = figure.text(0, 0, chart_text(name))
    figure.draw_without_rendering()
    literal, is_formula = text._preprocess_math(text.get_text())  # type: ignore[attr-defined]
    assert (literal, is_formula) == (name, False)


def test_a_label_in_lines_is_literal_too() -> None:
    lines = wrapped("a method of many words, $x^$ and\n$y").split("\n")
    assert lines == ["a method of many words,", r"\$x^\$ and \$y"]
