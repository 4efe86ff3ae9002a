"""Replacements for characters that the terminal's encoding cannot write.

A C locale, ``PYTHONIOENCODING`` or a redirected Windows console may lack bars, Greek
letters or ±; Python would raise a UnicodeEncodeError.
"""

import codecs
import io
import sys
import unicodedata
from typing import TextIO

_ERRORS = "knnper.plain"

# A bar becomes its height in eighths, one character, so that rows keep their length.
# Characters that are easily confused are written as names.
_PLAIN = {bar: str(number) for number, bar in enumerate("▁▂▃▄▅▆▇█", start=1)} | {
    "λ": "lambda",  # Unicode spells it lamda
    "±": "+-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "·": "*",
    "…": "...",
    "→": "->",
    "←": "<-",
    "≈": "~=",
    "∝": "~",
    "∈": "in",
    "∞": "inf",
    "∇": "grad ",
    "∂": "d",
    "½": "1/2",
    "ᵀ": "^T",
    "⁺": "^+",
    "⁻": "^-",
    "‖": "||",
    "\N{COMBINING MACRON}": "_bar",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "_hat",
    "\N{COMBINING TILDE}": "_tilde",
    "≤": "<=",
    "≥": ">=",
    "√": "sqrt",
    "²": "^2",
    "✓": "ok",
    "✗": "x",
}


def use_plain_text() -> None:
    """Let standard output and error replace characters that they cannot write."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def in_encoding_of(stream: TextIO, text: str) -> str:
    """Replace the characters of a text that a stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _ERRORS).decode(encoding)


def is_unicode(stream: TextIO) -> bool:
    """Return whether a stream can write every character."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return codecs.lookup(encoding).name.startswith("utf")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(map(_plain, text)), error.end


def _plain(character: str) -> str:
    """Return a character's replacement: a Greek letter's name, else an escape."""
    if character in _PLAIN:
        return _PLAIN[character]
    kind, _, letter = unicodedata.name(character, "").partition(" LETTER ")
    if kind.startswith("GREEK "):
        name = letter.split()[0].lower()
        return name.capitalize() if "CAPITAL" in kind else name
    return character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_ERRORS, _replace)
