"""What a worker process tells of the runs that it makes, as it makes them."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.queues import SimpleQueue
from typing import Any

from knnper.lifeline import die_with_parent
from server.observer import SilentObserver


class Step(Enum):
    """What happened."""

    BEGAN = auto()
    """A run of a family began; ``count`` is its place among the family's."""
    TRAINS = auto()
    """Training of so many rounds goes on, ``first`` of them the next."""
    ROUND = auto()
    """A round was made."""
    ENDED = auto()
    """The run has results, or has failed."""


@dataclass(frozen=True)
class Event:
    """A step of a run.

    Attributes
    ----------
    step
        What happened.
    at
        When, in seconds of a clock that all processes of a machine share.
    count, first
        See `Step`.
    """

    step: Step
    at: float
    count: int = 0
    first: int = 0


Tell = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Tell nobody."""


class TellingObserver(SilentObserver):
    """Tells the steps of a run.

    Parameters
    ----------
    tell
        Takes each.
    clock
        Returns seconds.
    """

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Tell which rounds there are."""
        self._tell(Event(Step.TRAINS, self._clock(), num_rounds, first_round))

    def round_finished(self, record: Mapping[str, float | int]) -> None:  # noqa: ARG002 - an observer's
        """Tell that there is one more."""
        self._tell(Event(Step.ROUND, self._clock()))


Told = tuple[int, Event]
"""Which family, and what of it."""

_queue: "SimpleQueue[Told] | None" = None


def begin_worker(parent: int, queue: "SimpleQueue[Told]") -> None:
    """Set a worker process up: it ends with its parent, and tells a queue."""
    global _queue
    die_with_parent(parent)
    _queue = queue


def play_telling(play: Callable[[Any, Tell], None], number: int, family: Any) -> None:
    """Play the ``number``-th family in a worker process."""
    queue = _queue
    play(family, nobody if queue is None else lambda event: queue.put((number, event)))


def told_by(queue: "SimpleQueue[Told]") -> Iterator[Told]:
    """Yield what was told until now."""
    while not queue.empty():
        yield queue.get()


def new_queue() -> "SimpleQueue[Told]":
    """Return a queue from worker processes, which do not share memory with this one."""
    return multiprocessing.get_context("spawn").SimpleQueue()
