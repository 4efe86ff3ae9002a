"""Names of any script in charts: told once where no font has their characters."""

import logging
import warnings
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from knnper.simulation.reports.charts import Picture, as_svg, report_style, settle
from knnper.simulation.reports.figure import (
    boxes_told,
    font_families,
    installed_fallbacks,
    styled,
    write_pictures,
)

UNDRAWN = "\U00012000\U00012001"
"""Cuneiform signs, in no font that charts turn to."""


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knnper.simulation.reports.figure._TOLD", set[str]())


def titled(title: str) -> Figure:
    figure = Figure()
    figure.add_subplot().set_title(title)
    return figure


def test_what_no_font_has_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning would be an error here."""
    with caplog.at_level(logging.WARNING):
        figure = styled(titled)(f"a {UNDRAWN}")
        picture = Picture(figure, "a chart")
        settle(picture)
        as_svg(picture, "chart")
        write_pictures(tmp_path, "f", figure)
    (message,) = caplog.messages
    assert "has the characters \U00012000 \U00012001: charts show boxes" in message
    assert (tmp_path / "f.pdf").is_file()


def test_what_can_be_drawn_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    settle(Picture(titled("λ, é"), "a chart"))
    assert caplog.messages == []


def test_other_warnings_are_kept() -> None:
    with pytest.warns(UserWarning, match="another"), boxes_told():
        warnings.warn("another", stacklevel=1)


def test_fonts_that_are_not_there_are_not_asked_for() -> None:
    names = {"Malgun Gothic", "DejaVu Sans", "Noto Sans CJK JP"}
    assert installed_fallbacks(names) == ["Noto Sans CJK JP", "Malgun Gothic"]
    with rc_context({"font.family": ["serif"]}):
        assert font_families()[0] == "serif"
    with report_style():
        assert titled("a").axes[0].title.get_fontfamily() == font_families()
