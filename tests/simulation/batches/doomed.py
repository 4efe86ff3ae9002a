"""Families that are made in no time, and one that no process survives."""

import os
import signal
from dataclasses import dataclass

from knnper.simulation.batches.family import (
    Event,
    RunStage,
    SendEvent,
)


@dataclass(frozen=True)
class Doomed:
    """Stands in for a family; needs no import that takes seconds."""

    runs: tuple[str, ...] = ("run",)


def die(family: Doomed, tell: object) -> None:
    """End as a process does that the system takes its memory from."""
    os.kill(os.getpid(), signal.SIGKILL)


def send_one_event(family: Doomed, send: SendEvent) -> None:
    """Send an event and end; the process must have huge pages."""
    assert "hugetlb=1" in os.environ["GLIBC_TUNABLES"]
    send(Event(RunStage.ROUND))
