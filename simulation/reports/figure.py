"""How all charts look: colours, fonts, axes, and the files they are written to."""

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from cycler import cycler
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import PercentFormatter

_LOG = logging.getLogger(__name__)

# Fonts with the Chinese, Japanese and Korean characters that the default font lacks.
FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
)
_MISSING = re.compile(r"Glyph (\d+) .*missing from")
_REPORTED: set[str] = set()  # characters that a warning was logged for

# No dates, so that equal figures are equal files.
_FORMATS: Mapping[str, Any] = {
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
    "png": {"dpi": 150},
}
_OF_METHOD = {"kNN-Per": 0, "FedAvg": 1, "FedAvg+": 2, "Local": 3}
P = ParamSpec("P")


@dataclass(frozen=True)
class Color:
    """One colour in two shades of nearly the same hue."""

    light: str
    dark: str


INK = Color("#1d2430", "#e9ecf1")  # text
# Axes, and what is only compared with: the unpersonalised model, the diagonal.
SOFT = Color("#5a6372", "#a3acba")
FAINT = Color("#dcdfe4", "#343b46")  # grids
# After Okabe and Ito, "Color universal design", 2008, darkened for thin lines.
SERIES = (
    Color("#0072b2", "#5db4ee"),
    Color("#c44e00", "#ff9350"),
    Color("#00805c", "#35cfa2"),
    Color("#a3478b", "#e791cc"),
    Color("#8f6b00", "#e3bf45"),
    Color("#5b50c4", "#a9a1ff"),
    Color("#7a3e1d", "#d29a78"),
    Color("#3d7f8f", "#7fd0e2"),
)


def font_families() -> list[str]:
    """Return the default fonts, then the installed fallbacks."""
    return [
        *rcParams["font.family"],
        *installed_fallbacks(fontManager.get_font_names()),
    ]


def installed_fallbacks(names: Collection[str]) -> list[str]:
    """Return those of `FALLBACKS` that are among the names, in their order."""
    return [name for name in FALLBACKS if name in names]


@contextlib.contextmanager
def logging_missing_glyphs() -> Iterator[None]:
    """Warn once about characters that no font has; a block, or a decorator."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _MISSING.pattern, UserWarning)
        yield
    missing = set[str]()
    for warning in caught:
        if match := _MISSING.match(str(warning.message)):
            missing.add(chr(int(match[1])))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if new := missing - _REPORTED:
        _REPORTED.update(new)
        _LOG.warning(
            "no font of this machine has the characters %s: charts show boxes in their "
            "place. Install one that has them, such as Noto Sans CJK for Chinese, "
            "Japanese and Korean, and draw again",
            " ".join(sorted(new)),
        )


@logging_missing_glyphs()
def write_pictures(
    folder: Path, name: str, figure: Figure, endings: Iterable[str] = tuple(_FORMATS)
) -> list[Path]:
    """Write ``name``.svg, ``name``.pdf and ``name``.png; return the files."""
    paths = {ending: folder / f"{name}.{ending}" for ending in endings}
    with rc_context({"svg.hashsalt": name}):
        for ending, path in paths.items():
            figure.savefig(path, **_FORMATS[ending])
    return list(paths.values())


def colors_of(titles: Iterable[str]) -> list[Color]:
    """Return a colour for each title; the same method has the same one everywhere."""
    titles = list(titles)
    fixed = {
        titles.index(title): place
        for title, place in _OF_METHOD.items()
        if title in titles
    }
    first = range(min(len(titles), len(SERIES)))
    used = {fixed[number] for number in first if number in fixed}
    free = iter(place for place in range(len(SERIES)) if place not in used)
    chosen = {number: next(free) for number in first if number not in fixed} | fixed
    return [
        SERIES[chosen.get(number, number % len(SERIES))]
        for number in range(len(titles))
    ]


@logging_missing_glyphs()
def settle(figure: Figure) -> None:
    """Fix the layout of a figure, so that all files of it are the same."""
    figure.draw_without_rendering()
    # "none" would leave an engine that draws each file twice.
    with rc_context(
        {"figure.autolayout": False, "figure.constrained_layout.use": False}
    ):
        figure.set_layout_engine(None)


def ink() -> Any:
    """Return matplotlib's settings for fonts and the colours of text and axes."""
    texts = ("text.", "axes.label", "axes.title", "xtick.label", "ytick.label")
    lines = ("axes.edgecolor", "xtick.color", "ytick.color")
    return {
        "font.family": font_families(),
        **dict.fromkeys((f"{text}color" for text in texts), INK.light),
        **dict.fromkeys(lines, SOFT.light),
    }


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function to draw in colours that a page can switch to dark mode."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        style: Any = {
            **ink(),
            "axes.prop_cycle": cycler(color=[color.light for color in SERIES]),
            "legend.edgecolor": FAINT.light,
        }
        with rc_context(style):
            figure = draw(*args, **kwargs)
            # Ticks are created when the figure is laid out, and get their colours then.
            settle(figure)
        return figure

    return drawn


def accuracy_axis(axes: Axes, label: str = "test accuracy") -> None:
    """Make the vertical axis one of accuracies in percent, with a grid."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.grid(alpha=0.3)
