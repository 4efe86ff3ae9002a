"""Text that somebody else wrote, on its way into a log."""

MOST_CHARACTERS = 500

_CUT = " ... "
# Of a traceback, the end says what is wrong.
_FROM_THE_START = 150


def printable(text: str) -> str:
    """Return ``text`` as one line of at most `MOST_CHARACTERS` characters.

    Control characters are escaped, so that it cannot pass for a line of its own or
    steer a terminal; a text that is too long loses its middle.
    """
    if len(text) > MOST_CHARACTERS:
        text = _shortened(text)
    if not text.isprintable():
        text = "".join(one if one.isprintable() else _escaped(one) for one in text)
    return _shortened(text) if len(text) > MOST_CHARACTERS else text


def _shortened(text: str) -> str:
    to_the_end = MOST_CHARACTERS - _FROM_THE_START - len(_CUT)
    return text[:_FROM_THE_START] + _CUT + text[-to_the_end:]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
