"""A chart as part of an HTML page: themed, named, and with nothing from elsewhere."""

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from matplotlib import rc_context

from simulation.figures.lettering import boxes_told
from simulation.figures.palette import FAINT, INK, SERIES, SOFT, Color
from simulation.outside_text import one_line
from simulation.reporting.drawing import Picture

THEMED: Mapping[str, Color] = {
    "ink": INK,
    "soft": SOFT,
    "faint": FAINT,
    **{f"series-{number}": color for number, color in enumerate(SERIES)},
}
"""Colours that follow the page, light or dark, by the name of a CSS variable."""

_SVG = "{http://www.w3.org/2000/svg}"
_SHADES = {
    "#ffffff": "var(--paper)",
    **{color.light: f"var(--{name})" for name, color in THEMED.items()},
}
_SHADE = re.compile("|".join(map(re.escape, _SHADES)), re.IGNORECASE)


@boxes_told()
def as_svg(picture: Picture, name: str) -> str:
    """Return a chart as an ``svg`` element for the inside of an HTML page.

    Parameters
    ----------
    picture
        The chart.
    name
        Begins all ids of the element, so that no two charts of a page share one.
    """
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        picture.figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    _remove(root, f"{_SVG}metadata", f"{_SVG}style")
    for element in root.iter():
        _localise(element, name)
    _name(root, picture.alternative)
    return ElementTree.tostring(root, encoding="unicode")


def _remove(root: ElementTree.Element, *tags: str) -> None:
    """Remove what is about the file, and the style, which would be the whole page's."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in tags:
                parent.remove(child)


def _localise(element: ElementTree.Element, name: str) -> None:
    """Take an element out of its XML document and into the page."""
    element.tag = _without_namespace(element.tag)
    attributes = {
        _without_namespace(key): _SHADE.sub(_shade, _prefixed(key, value, name))
        for key, value in element.attrib.items()
    }
    element.attrib.clear()
    element.attrib.update(attributes)


def _without_namespace(tag: str) -> str:
    return tag.rpartition("}")[2]


def _prefixed(key: str, value: str, name: str) -> str:
    """Begin an id, or a reference to one, with the chart's name."""
    if key == "id":
        return f"{name}-{value}"
    value = value.replace("url(#", f"url(#{name}-")
    if key.endswith("href") and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    return value


def _shade(found: re.Match[str]) -> str:
    return _SHADES[found.group().lower()]


def _name(root: ElementTree.Element, alternative: str) -> None:
    """Give the chart its alternative text, and let the page say how large it is."""
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    # Not a title element: browsers would show that over the chart.
    root.set("aria-label", one_line(alternative))
