"""Tables as text."""

import logging
import warnings
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from knnper.simulation.reports.figure import (
    font_families,
    installed_fallbacks,
    logging_missing_glyphs,
    settle,
    styled,
    write_pictures,
)
from knnper.simulation.reports.picture import (
    DescribedChart,
    as_svg,
    report_style,
    wrapped,
)
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import (
    chart_text,
    markdown_cell,
    markdown_text,
    one_line,
)


def test_a_cell_stays_one() -> None:
    table = Table.of_cells("t", [["name", "x"], ["a|b\nc", "1|2"]])
    assert table.as_markdown().splitlines() == [
        "| name   |    x |",
        "| ------ | ---: |",
        r"| a\|b c | 1\|2 |",
    ]


# Names from outside stay one line, one cell, and no formula.


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


# Names of any script in charts: told once where no font has their characters.


UNDRAWN = "\U00012000\U00012001"  # cuneiform signs, in no font that charts turn to


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knnper.simulation.reports.figure._REPORTED", set[str]())


def titled(title: str) -> Figure:
    figure = Figure()
    figure.add_subplot().set_title(title)
    return figure


def test_no_font_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning would be an error here."""
    with caplog.at_level(logging.WARNING):
        figure = styled(titled)(f"a {UNDRAWN}")
        picture = DescribedChart(figure, "a chart")
        settle(figure)
        as_svg(picture, "chart")
        write_pictures(tmp_path, "f", figure)
    (message,) = caplog.messages
    assert "has the characters \U00012000 \U00012001: charts show boxes" in message
    assert (tmp_path / "f.pdf").is_file()


def test_what_can_be_drawn_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    settle(titled("λ, é"))
    assert caplog.messages == []


def test_other_warnings_are_kept() -> None:
    with pytest.warns(UserWarning, match="another"), logging_missing_glyphs():
        warnings.warn("another", stacklevel=1)


def test_fonts_that_are_not_there_are_not_asked_for() -> None:
    names = {"Malgun Gothic", "DejaVu Sans", "Noto Sans CJK JP"}
    assert installed_fallbacks(names) == ["Noto Sans CJK JP", "Malgun Gothic"]
    with rc_context({"font.family": ["serif"]}):
        assert font_families()[0] == "serif"
    with report_style():
        assert titled("a").axes[0].title.get_fontfamily() == font_families()
