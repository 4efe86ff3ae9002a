"""Fonts for names of any script, and what this machine's fonts cannot draw."""

import contextlib
import logging
import re
import warnings
from collections.abc import Collection, Iterator

from matplotlib import rcParams
from matplotlib.font_manager import fontManager

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
"""Have Chinese, Japanese or Korean characters, which the first font lacks."""

_LOG = logging.getLogger(__name__)
_MISSING = re.compile(r"Glyph (\d+) .*missing from")
_TOLD: set[str] = set()
"""Characters that need not be told again."""


def font_families() -> list[str]:
    """Return the usual fonts, and those to turn to where these lack a character."""
    return [
        *rcParams["font.family"],
        *installed_fallbacks(fontManager.get_font_names()),
    ]


def installed_fallbacks(names: Collection[str]) -> list[str]:
    """Return which of `FALLBACKS` are among the names of fonts, in their order.

    matplotlib warns of every font that is asked for and not there.
    """
    return [name for name in FALLBACKS if name in names]


@contextlib.contextmanager
def boxes_told() -> Iterator[None]:
    """Log once which characters no font has, inside the block or when decorating.

    matplotlib draws a box for each and warns whenever one is laid out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _MISSING.pattern, UserWarning)
        yield
    missing = set[str]()
    for one in caught:
        if found := _MISSING.match(str(one.message)):
            missing.add(chr(int(found[1])))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if new := missing - _TOLD:
        _TOLD.update(new)
        _LOG.warning(
            "no font of this machine has the characters %s: charts show boxes in their "
            "place. Install one that has them, such as Noto Sans CJK for Chinese, "
            "Japanese and Korean, and draw again",
            " ".join(sorted(new)),
        )
