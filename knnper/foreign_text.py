"""Text that somebody else wrote, on its way into a log or to a terminal.

It is made `printable` where it arrives. What is written goes through `harmless` all
the same: errors quote what they were given.
"""

import logging
import re

MOST_CHARACTERS = 500


MOST_LOGGED = 20_000


# All that steers a terminal, or turns the direction of a line round; not the ends of
# lines and tabs.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


_CUT = " ... "


# Of a traceback, the end says what is wrong.
_FROM_THE_START = 150


def printable(text: str) -> str:
    """Return ``text`` as one line of at most `MOST_CHARACTERS` characters."""
    if len(text) > MOST_CHARACTERS:
        text = _shortened(text)
    if not text.isprintable():
        text = "".join(one if one.isprintable() else _escaped(one) for one in text)
    return _shortened(text) if len(text) > MOST_CHARACTERS else text


def harmless(text: str) -> str:
    """Return ``text``, of any number of lines, with what steers a terminal escaped."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class HarmlessFormatter(logging.Formatter):
    """Writes records of which no part can pass for another record.

    All lines of one but the first are indented, and what steers a terminal is escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        text = super().format(record)
        if len(text) > MOST_LOGGED:
            text = f"{text[:MOST_LOGGED]}{_CUT}"
        return harmless(text).replace("\n", "\n    ")


def write_harmlessly(layout: str) -> None:
    """Let this process log to standard error, from INFO on, harmlessly."""
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter(layout))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _shortened(text: str) -> str:
    to_the_end = MOST_CHARACTERS - _FROM_THE_START - len(_CUT)
    return text[:_FROM_THE_START] + _CUT + text[-to_the_end:]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
