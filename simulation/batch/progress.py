"""How far the runs of a batch are, and how long the rest takes.

The rest is what the workers wait for: the rounds and hand-overs that are left of each
family, in the order in which workers take the families. A family is made by one worker
alone, so the last ones may keep a single worker busy while the others are idle.
"""

import functools
import heapq
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.config.document import dotted
from server.run_folder import RunFolder
from simulation.batch.events import Event, Step, Told
from simulation.batch.playing import Family, is_done

Settings = frozenset[tuple[str, str]]
_TELL_NOTHING = ("name", "run.seed")
"""Settings that do not change how long a run takes."""

_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimeLeft:
    """How long the rest takes.

    Attributes
    ----------
    seconds
        From now on.
    is_least
        Whether it takes more: no run like some of the rest has been personalised yet,
        so how long that takes is not known.
    """

    seconds: float
    is_least: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a batch is.

    Attributes
    ----------
    done, total
        Steps or runs.
    found
        Those of them that were there before.
    left
        How long the rest takes; None is not known.
    """

    done: int
    total: int
    found: int
    left: TimeLeft | None


Advance = Callable[[Progress], None]


class _Measured:
    """How long pieces of work took, by the settings of their runs.

    Parameters
    ----------
    fewest
        Pieces that tell anything: the first rounds of a training take longer.
    """

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest
        self._seconds: dict[Settings, list[float]] = {}
        self._distance = functools.cache(lambda one, other: len(one ^ other))

    def note(self, settings: Settings, seconds: float) -> None:
        self._seconds.setdefault(settings, []).append(seconds)

    def like(self, settings: Settings) -> float | None:
        """Return the median over the pieces of which the fewest settings differ."""
        by_distance: dict[int, list[float]] = {}
        for other, seconds in self._seconds.items():
            by_distance.setdefault(self._distance(settings, other), []).extend(seconds)
        nearest: list[float] = []
        for distance in sorted(by_distance):
            if len(nearest) < self._fewest:
                nearest += by_distance[distance]
        return statistics.median(nearest) if len(nearest) >= self._fewest else None


@dataclass
class _Run:
    settings: Settings
    folder: Path
    is_done: bool


@dataclass
class _State:
    """How far a family is.

    Attributes
    ----------
    runs
        In their order.
    num_rounds, num_made
        Rounds that its training takes, and those that are there.
    began, marked
        When the present run began; when its last round or client was told.
    trained
        What the rounds of the present run took.
    handing
        When the hand-over of the present run began; None before.
    part
        Which part of its clients is personalised.
    """

    runs: list[_Run]
    num_rounds: int
    num_made: int
    present: int | None = None
    began: float = 0.0
    marked: float = 0.0
    trained: float = 0.0
    handing: float | None = None
    num_clients: int = 0
    part: float = 0.0

    @property
    def is_done(self) -> bool:
        return all(run.is_done for run in self.runs)

    @property
    def of_training(self) -> Settings:
        """The settings that a training depends on."""
        return frozenset(
            one for one in self.runs[0].settings if not one[0].startswith("personal")
        )


class Tracker:
    """Follows what workers tell, and reckons how long the rest takes.

    Parameters
    ----------
    num_workers
        Processes side by side.
    clock
        Returns seconds, those of the events.
    """

    def __init__(
        self, num_workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_workers = num_workers
        self._clock = clock
        self._rounds, self._hand_overs = _Measured(_FEWEST_ROUNDS), _Measured(1)
        self._states: list[_State] = []
        self._played: list[_State] = []
        self._later: list[_State] = []

    def expect(
        self, families: Sequence[Family], later: Sequence[Family] = ()
    ) -> list[Family]:
        """Take what is to be made; what is there already tells how long it took.

        Parameters
        ----------
        families
            All that this is about.
        later
            What is made when these are done, as far as is known now.

        Returns
        -------
        list
            The families of which a run is missing, in the order in which workers are
            to take them.
        """
        self._states = [self._state(family) for family in families]
        self._later = [self._state(family) for family in later]
        self._played = [state for state in self._states if not state.is_done]
        return [
            family
            for family, state in zip(families, self._states, strict=True)
            if not state.is_done
        ]

    def note(self, told: Iterable[Told]) -> None:
        """Take what workers told; families are numbered as `expect` returned them."""
        for number, event in told:
            _NOTED[event.step](self, self._played[number], event)

    @property
    def num_steps(self) -> int:
        """Rounds of all trainings, and a hand-over for each run."""
        return sum(one.num_rounds + len(one.runs) for one in self._states)

    @property
    def num_made(self) -> int:
        """Those that are there."""
        return sum(
            one.num_made + sum(run.is_done for run in one.runs) for one in self._states
        )

    def left(self) -> TimeLeft | None:
        """Return how long the rest takes; None while too few rounds were timed."""
        now, seconds, is_least = self._clock(), 0.0, False
        for stage in (self._played, self._later):
            rest = [self._rest(one, now) for one in stage if not one.is_done]
            known = [one for one in rest if one is not None]
            if len(known) < len(rest):
                return None
            seconds += _side_by_side([one.seconds for one in known], self._num_workers)
            is_least = is_least or any(one.is_least for one in known)
        return TimeLeft(seconds, is_least)

    def _rest(self, state: _State, now: float) -> TimeLeft | None:
        """Return how long a family keeps a worker busy from now on."""
        seconds, num_left = 0.0, state.num_rounds - state.num_made
        if num_left > 0:
            each = self._rounds.like(state.of_training)
            if each is None:
                return None
            waited = 0.0 if state.present is None else now - state.marked
            seconds += max(num_left * each - waited, (num_left - 1) * each)
        is_least = False
        for place, run in enumerate(state.runs):
            if run.is_done:
                continue
            each = self._hand_overs.like(run.settings)
            is_least = is_least or each is None
            of_run = each or 0.0
            if place == state.present and state.handing is not None:
                if state.part > 0:
                    of_run = (state.marked - state.handing) / state.part
                of_run = max(of_run - (now - state.handing), 0.0)
            seconds += of_run
        return TimeLeft(seconds, is_least)

    def _state(self, family: Family) -> _State:
        runs = [
            _Run(_settings(order.experiment), order.folder, is_done(order.folder))
            for order in family.orders
        ]
        state = _State(runs, family.num_rounds, 0)
        if any(run.is_done for run in runs) or family.earlier is not None:
            state.num_made = family.num_rounds
        else:
            made = max(len(RunFolder(run.folder).rounds()) for run in runs)
            state.num_made = min(made, family.num_rounds)
        for run in runs:
            self._recall(state, run)
        return state

    def _recall(self, state: _State, run: _Run) -> None:
        """Note how long a run took that was made before; a failed one tells nothing."""
        if not run.is_done or not RunFolder(run.folder).is_finished():
            return
        training = RunFolder(run.folder).results()["training"]
        if training["num_rounds"]:
            each = training["seconds"] / training["num_rounds"]
            self._rounds.note(state.of_training, each)
        self._hand_overs.note(run.settings, training["personalization_seconds"])

    def _began(self, state: _State, event: Event) -> None:
        state.present, state.began, state.marked = event.count, event.at, event.at
        state.trained, state.handing, state.part = 0.0, None, 0.0

    def _trains(self, state: _State, event: Event) -> None:
        state.marked = event.at
        num_new = event.count - event.first + 1
        if not any(run.is_done for run in state.runs):
            state.num_rounds, state.num_made = event.count, event.first - 1
        elif num_new > 0:
            # What is on top of the method has a state of its own, and trains anew.
            state.num_rounds = state.num_made + num_new

    def _round(self, state: _State, event: Event) -> None:
        seconds = event.at - state.marked
        state.marked = event.at
        state.trained += seconds
        state.num_made += 1
        self._rounds.note(state.of_training, seconds)

    def _personalizes(self, state: _State, event: Event) -> None:
        state.handing, state.num_clients = event.at, event.count

    def _clients(self, state: _State, event: Event) -> None:
        state.part, state.marked = event.count / max(state.num_clients, 1), event.at

    def _ended(self, state: _State, event: Event) -> None:
        if state.present is None:
            return
        run = state.runs[state.present]
        run.is_done = True
        if state.handing is not None:
            self._hand_overs.note(run.settings, event.at - state.began - state.trained)
        # A training that diverged makes no more rounds.
        state.num_rounds = state.num_made
        state.present, state.handing = None, None


_NOTED: dict[Step, Callable[[Tracker, _State, Event], None]] = {
    Step.BEGAN: Tracker._began,
    Step.TRAINS: Tracker._trains,
    Step.ROUND: Tracker._round,
    Step.PERSONALIZES: Tracker._personalizes,
    Step.CLIENTS: Tracker._clients,
    Step.ENDED: Tracker._ended,
}


def _side_by_side(seconds: Iterable[float], num_workers: int) -> float:
    """Return how long workers take that take the next piece when they have none."""
    busy = [0.0] * num_workers
    for one in seconds:
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy)


def _settings(experiment: str) -> Settings:
    found = dotted(json.loads(experiment))
    return frozenset(
        (key, json.dumps(value)) for key, value in found if key not in _TELL_NOTHING
    )
