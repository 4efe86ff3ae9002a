"""What the gateway tells a registered client that asks how it stands.

Flower has no question for that. A request to activate the node with a pause of no
length between its signs of life is refused in any case, and only after the signature
and the registration were found in order: nothing changes by asking.
"""

import json
from dataclasses import dataclass

IMPOSSIBLE_PAUSE_S = 0.0
"""What `ActivateNode` is asked for; Flower takes 10 s and more."""

_KEY = "standing"


@dataclass(frozen=True)
class Standing:
    """A client in the gateway's eyes.

    Attributes
    ----------
    name
        What its key is registered as; None if the gateway does not know yet.
    idle_s
        Seconds since a node with this key was last heard of; None if it never was, or
        has left.
    """

    name: str | None
    idle_s: float | None


def with_standing(body: bytes, standing: Standing) -> bytes:
    """Return Flower's JSON error ``body`` with the client's standing beside it."""
    try:
        error = json.loads(body)
        told = {"name": standing.name, "idle_s": standing.idle_s}
        return json.dumps({**error, _KEY: told}).encode()
    except (ValueError, TypeError):
        return body


def standing_in(body: str) -> Standing | None:
    """Return the standing in an answer; None of a server that tells none."""
    try:
        told = json.loads(body)[_KEY]
        return Standing(told["name"], told["idle_s"])
    except (ValueError, TypeError, KeyError):
        return None
