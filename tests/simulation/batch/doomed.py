"""A family that no process survives."""

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Doomed:
    """Stands in for a family; needs no import that takes seconds."""

    orders: tuple[str, ...] = ("run",)


def die(family: Doomed) -> None:
    """End as a process does that the system takes its memory from."""
    os.kill(os.getpid(), signal.SIGKILL)
