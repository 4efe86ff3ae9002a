"""The characters that text is made of, and their ids."""

import string
import unicodedata

import numpy as np
from numpy.typing import NDArray

ALPHABET = (
    "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
    + string.ascii_lowercase + "}"
)  # fmt: skip
UNKNOWN = len(ALPHABET)
NUM_TOKENS = len(ALPHABET) + 1
CHARACTER_NAMES = (*(repr(character) for character in ALPHABET), "unknown")

_FIRST_OUTSIDE = 128
# Curly quotation marks, and the two longer dashes.
_TYPOGRAPHIC = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")


def _ids_by_code_point() -> NDArray[np.uint8]:
    """Return the id of each code point up to the first that no character has."""
    ids = np.full(_FIRST_OUTSIDE + 1, UNKNOWN, dtype=np.uint8)
    ids[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return ids


_IDS = _ids_by_code_point()


def encode(text: str) -> NDArray[np.uint8]:
    """Return the id of each character of ``text``, uint8 of shape (len(text),).

    The ids are those of LEAF's Shakespeare [1]_: a character's place among the 80 of
    `ALPHABET`. Whatever is not among them has the id `UNKNOWN`, 80.

    Parameters
    ----------
    text
        Any text; a character outside ASCII is one character, and unknown.

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
    """Return ``text`` without accents, with plain quotes, dashes and line ends."""
    text = text.replace("\r\n", "\n")
    if text.isascii():
        return text
    parts = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC))
    return "".join(one for one in parts if not unicodedata.combining(one))
