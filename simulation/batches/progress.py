"""How far a batch is, and how long the rest takes; one worker makes a family."""

import functools
import heapq
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from knnper.experiment import dotted
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import Event, Family, Step, is_done

Told = tuple[int, Event]  # which family, and what of it
Settings = frozenset[tuple[str, str]]
_TELL_NOTHING = ("name", "run.seed")  # settings that do not change how long a run takes
_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimeLeft:
    """How long the rest takes, in seconds from now on."""

    seconds: float
    # No run like some of the rest was personalised yet: it takes more than that.
    is_least: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a batch is, in steps."""

    done: int
    total: int
    found: int  # those that were there before
    left: TimeLeft | None  # None is not known


Advance = Callable[[Progress], None]


class _Measured:
    """How long pieces of work took, by the settings of their runs."""

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest  # fewer tell nothing: the first rounds take longer
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
class _State:
    """How far a family is."""

    runs: list[Settings]
    ahead: set[int]  # the places of those that are not done
    num_rounds: int  # that its training takes
    num_made: int = 0  # rounds that are there
    present: int | None = None  # the place of the run that is made now
    began: float = 0.0  # that run
    marked: float = 0.0  # when its training began or its last round ended
    trained: float | None = None  # what its rounds took; None before training

    @property
    def of_training(self) -> Settings:
        """The settings that a training depends on."""
        return frozenset(one for one in self.runs[0] if "personal" not in one[0])

    @property
    def num_steps(self) -> int:
        """Rounds of its training, and a personalisation for each run."""
        return self.num_rounds + len(self.runs)

    @property
    def num_done(self) -> int:
        """Those that are there."""
        return self.num_made + len(self.runs) - len(self.ahead)

    def note(self, event: Event) -> float | None:
        """Return how long a round took, or all of a run but its rounds, where one ends.

        Of a run that failed it is None.
        """
        match event.step:
            case Step.BEGAN:
                self.present, self.trained = event.count, None
                self.began = self.marked = event.at
            case Step.TRAINS:
                self.marked, self.trained = event.at, 0.0
                num_new = event.count - event.first + 1
                if len(self.ahead) == len(self.runs):
                    self.num_rounds, self.num_made = event.count, event.first - 1
                elif num_new > 0:
                    # What is on top has a state of its own, and trains anew.
                    self.num_rounds = self.num_made + num_new
            case Step.ROUND:
                seconds, self.marked = event.at - self.marked, event.at
                self.trained = (self.trained or 0.0) + seconds
                self.num_made += 1
                return seconds
            case Step.ENDED:
                self.ahead.discard(-1 if self.present is None else self.present)
                failed = self.trained is None or self.num_made < self.num_rounds
                self.num_rounds = self.num_made  # one that diverged makes no more
                self.present = None
                return None if failed else event.at - self.began - (self.trained or 0.0)
        return None


class Tracker:
    """Follows what workers tell, and reckons how long the rest takes."""

    def __init__(
        self, num_workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_workers = num_workers
        self._clock = clock
        self._rounds, self._personalized = _Measured(_FEWEST_ROUNDS), _Measured(1)
        self._states: list[_State] = []
        self._missing: list[_State] = []
        self._later: list[_State] = []
        self._before = self._done = self._found = 0

    def expect(
        self, families: Sequence[Family], later: Sequence[Family] = ()
    ) -> list[Family]:
        """Begin a stage; return the families of which a run is missing."""
        self._before += self.num_steps
        self._states = [self._state(family) for family in families]
        self._later = [self._state(family) for family in later]
        self._missing = [state for state in self._states if state.ahead]
        self._found += self.num_made
        both = zip(families, self._states, strict=True)
        return [family for family, state in both if state.ahead]

    def progress(self) -> Progress:
        """Return how far the stages are."""
        # Rounds since the last checkpoint are repeated, and counted once.
        self._done = max(self._done, self._before + self.num_made)
        total = self._before + self.num_steps
        total += sum(one.num_steps for one in self._later)
        return Progress(self._done, total, self._found, self.left())

    def note(self, told: Iterable[Told]) -> None:
        """Take what workers told; families are numbered as `expect` returned them."""
        for number, event in told:
            state = self._missing[number]
            settings = state.runs[state.present or 0]
            seconds = state.note(event)
            if seconds is not None and event.step is Step.ROUND:
                self._rounds.note(state.of_training, seconds)
            elif seconds is not None:
                self._personalized.note(settings, seconds)

    @property
    def num_steps(self) -> int:
        """Those of all families of the stage."""
        return sum(one.num_steps for one in self._states)

    @property
    def num_made(self) -> int:
        """Those that are there."""
        return sum(one.num_done for one in self._states)

    def left(self) -> TimeLeft | None:
        """Return how long the rest takes; None while too few rounds were timed."""
        now, seconds, is_least = self._clock(), 0.0, False
        for stage in (self._missing, self._later):
            rest = [self._rest(one, now) for one in stage if one.ahead]
            known = [one for one in rest if one is not None]
            if len(known) < len(rest):
                return None
            # Each worker takes the next piece when it has none.
            busy = [0.0] * self._num_workers
            for one in known:
                heapq.heapreplace(busy, busy[0] + one.seconds)
            seconds += max(busy)
            is_least = is_least or any(one.is_least for one in known)
        return TimeLeft(seconds, is_least)

    def _rest(self, state: _State, now: float) -> TimeLeft | None:
        """Return how long a family keeps a worker busy from now on."""
        seconds, num_left = 0.0, state.num_rounds - state.num_made
        waited = 0.0 if state.present is None else now - state.marked
        if num_left > 0:
            each = self._rounds.like(state.of_training)
            if each is None:
                return None
            seconds += max(num_left * each - waited, (num_left - 1) * each)
        expected = {
            place: self._personalized.like(state.runs[place]) for place in state.ahead
        }
        for place, personalization in expected.items():
            goes_on = place == state.present and num_left <= 0
            seconds += max((personalization or 0.0) - waited * goes_on, 0.0)
        return TimeLeft(seconds, is_least=None in expected.values())

    def _state(self, family: Family) -> _State:
        folders = list(family.runs)
        state = _State(
            list(map(_settings, family.runs.values())),
            {place for place, folder in enumerate(folders) if not is_done(folder)},
            family.num_rounds,
        )
        if len(state.ahead) < len(folders) or family.earlier is not None:
            state.num_made = family.num_rounds
        else:
            made = max(len(RunFolder(folder).rounds()) for folder in folders)
            state.num_made = min(made, family.num_rounds)
        for folder, settings in zip(folders, state.runs, strict=True):
            # How long runs took that were made before.
            if RunFolder(folder).is_finished():
                training = RunFolder(folder).results()["training"]
                if training["num_rounds"]:
                    each = training["seconds"] / training["num_rounds"]
                    for _ in range(_FEWEST_ROUNDS):
                        self._rounds.note(state.of_training, each)
                self._personalized.note(settings, training["personalization_seconds"])
        return state


def _settings(experiment: str) -> Settings:
    found = dotted(json.loads(experiment))
    return frozenset(
        (key, json.dumps(value)) for key, value in found if key not in _TELL_NOTHING
    )
