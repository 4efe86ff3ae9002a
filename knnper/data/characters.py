"""Text as windows of character ids, in the alphabet of LEAF's Shakespeare."""

import logging
import string
import unicodedata
from collections import Counter

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from knnper.errors import DataError

_LOG = logging.getLogger(__name__)
ALPHABET = (
    "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
    + string.ascii_lowercase + "}"
)  # fmt: skip
UNKNOWN = len(ALPHABET)
NUM_TOKENS = len(ALPHABET) + 1
CHARACTER_NAMES = (*(repr(character) for character in ALPHABET), "unknown")
_FIRST_OUTSIDE = 128
# Curly quotation marks, en dash and em dash.
_TYPOGRAPHIC = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
# Id of each code point; code points from _FIRST_OUTSIDE on share the last entry.
_IDS = np.full(_FIRST_OUTSIDE + 1, UNKNOWN, dtype=np.uint8)
_IDS[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
_MAX_UNKNOWN = 0.05
_LIMIT_UNKNOWN = 0.5
_NUM_SHOWN = 5
_WITHOUT_KNOWN = str.maketrans("", "", ALPHABET)


def encode(text: str) -> NDArray[np.uint8]:
    """Convert text to the ids of its characters, uint8 of shape (len(text),).

    The ids are those of LEAF's Shakespeare [1]_: positions in `ALPHABET`, which has 80
    characters. All other characters have the id `UNKNOWN`, 80.

    References
    ----------
    .. [1] S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
       ``models/utils/language_utils.py``.
    """
    stored = text.encode("utf-32-le", errors="surrogatepass")
    codes = np.frombuffer(stored, dtype="<u4")
    ids: NDArray[np.uint8] = _IDS[np.minimum(codes, _FIRST_OUTSIDE)]
    return ids


def plain(text: str) -> str:
    """Remove accents, and replace typographic quotes, dashes and line ends by ASCII."""
    text = text.replace("\r\n", "\n")
    if text.isascii():
        return text
    parts = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC))
    return "".join(
        character for character in parts if not unicodedata.combining(character)
    )


class UnknownCharacters:
    """Counts characters outside of the alphabet, which all share one id."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._num_characters = 0

    def count(self, text: str) -> None:
        """Add the characters of ``text``."""
        self._num_characters += len(text)
        self._counts.update(text.translate(_WITHOUT_KNOWN))

    def require_few(self, source: str) -> None:
        """Warn above 5 % of unknown characters; raise a `DataError` above 50 %."""
        share = self._counts.total() / max(self._num_characters, 1)
        if share <= _MAX_UNKNOWN:
            return
        # Ties in the order of code points, so that the message is deterministic.
        ordered = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        commonest = ", ".join(repr(character) for character, _ in ordered[:_NUM_SHOWN])
        message = (
            f"{source}: {share:.0%} of the characters are outside of the alphabet of "
            f"{len(ALPHABET)} characters, most often {commonest}; all of them become "
            "the class 'unknown'. Write them in Latin letters, or remove them"
        )
        if share > _LIMIT_UNKNOWN:
            raise DataError(message)
        _LOG.warning("%s", message)


def target_positions(
    num_characters: int, window: int, stride: int
) -> NDArray[np.int64]:
    """Return the positions of the characters to predict, int64 of shape (n,).

    The first is at ``window``, and ``stride`` is the distance between them.
    """
    return np.arange(window, num_characters, stride, dtype=np.int64)


def windows_before(
    ids: NDArray[np.uint8], targets: NDArray[np.int64], window: int
) -> NDArray[np.uint8]:
    """Return the T ids before each of n positions, uint8 of shape (n, 1, 1, T)."""
    if len(targets) == 0:
        return np.empty((0, 1, 1, window), dtype=np.uint8)
    windows: NDArray[np.uint8] = sliding_window_view(ids, window)[targets - window]
    return windows[:, None, None, :]
