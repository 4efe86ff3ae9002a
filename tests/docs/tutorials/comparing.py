"""What a page shows of an output, compared with what was written."""

import re
from collections.abc import Sequence

NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")
POINTS = 5.0
SHARE = 0.05
_ANYTHING = "…"


def difference(shown: str, written: str) -> str | None:
    """Return how an output differs from what a page shows of it, or None.

    The lines that are shown must have been written, one after the other. Spaces count
    as one. A line of … stands for any lines, … within a line for anything. A number
    with a decimal point may depend on the machine: it may be `POINTS` larger or
    smaller, with three decimals or more only `SHARE`, or that part of itself.
    """
    numbers = NUMBER.findall(shown)
    matches = re.finditer(_pattern(shown), f"\n{_plain(written)}\n")
    found = [match.groups() for match in matches]
    if not found:
        return f"shown:\n{shown}\nwritten:\n{written}"
    if any(_near(numbers, one) for one in found):
        return None
    return f"numbers shown: {numbers}\nwritten: {found[0]}"


def _near(shown: Sequence[str], written: Sequence[str]) -> bool:
    return all(
        abs(float(one) - float(other)) <= _tolerance(one)
        for one, other in zip(shown, written, strict=True)
    )


def _tolerance(number: str) -> float:
    num_decimals = len(number.partition(".")[2])
    return max(SHARE if num_decimals > 2 else POINTS, SHARE * abs(float(number)))


def _plain(text: str) -> str:
    """Return the text without differences that cannot be seen."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(lines)


def _pattern(shown: str) -> str:
    parts = []
    for line in _plain(shown).splitlines():
        if line == _ANYTHING:
            parts.append(r"(?:\n.*)*?")
        else:
            pieces = map(_numbers_open, re.split(f" ?{_ANYTHING} ?", line))
            parts.append(r"\n" + ".*?".join(pieces))
    return "".join(parts) + r"(?=\n)"


def _numbers_open(piece: str) -> str:
    """Return a pattern in which every number with a decimal point is a group."""
    fixed = (re.escape(one) for one in NUMBER.split(piece))
    return r"(-?\d+\.\d+)".join(fixed)
