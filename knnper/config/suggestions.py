"""Wording that all messages about settings share."""

import difflib
import json
from collections.abc import Iterable

LONGEST_VALUE = 60


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar name was meant; may be empty."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""


def alternatives(name: str, known: Iterable[str]) -> str:
    """Return what could have been meant by ``name``: the nearest, then all of them."""
    names = sorted(known)
    everything = f"known: {', '.join(names)}" if names else "none are known here"
    return " ".join(filter(None, (nearest(name, names), everything)))


def shown(value: object) -> str:
    """Return ``value`` as it would be written in a file, cut where it gets long."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}..."
