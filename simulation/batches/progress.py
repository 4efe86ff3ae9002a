"""The progress of a batch in steps: rounds of training, and personalisations."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.family import Event, Family, RunStage, is_done

FamilyEvent = tuple[int, Event]  # the number of the family, and its event


@dataclass(frozen=True)
class Progress:
    """The progress of a batch.

    Attributes
    ----------
    at_start
        Steps that were done before the batch was started.
    seconds_left
        An estimate that takes all steps as equally long; None before the first step.
    """

    done: int
    total: int
    at_start: int
    seconds_left: float | None = None


Advance = Callable[[Progress], None]


def seconds_left(
    began: float, now: float, done: int, total: int, at_start: int
) -> float | None:
    """Estimate the remaining time from the mean time of a step; None without steps."""
    num_new = done - at_start
    return (now - began) / num_new * (total - done) if num_new > 0 else None


@dataclass
class _FamilyState:
    """The progress of a family.

    Attributes
    ----------
    num_missing
        Runs that are not done.
    num_rounds, num_made
        Rounds of its training, and those that are done.
    """

    num_runs: int
    num_missing: int
    num_rounds: int
    num_made: int = 0

    @property
    def num_steps(self) -> int:
        """Rounds of its training, and a personalisation for each run."""
        return self.num_rounds + self.num_runs

    @property
    def num_done(self) -> int:
        """Steps that are done."""
        return self.num_made + self.num_runs - self.num_missing

    def handle(self, event: Event) -> None:
        match event.stage:
            case RunStage.TRAINS:
                num_new = event.num_rounds - event.first_round + 1
                if self.num_missing == self.num_runs:
                    self.num_rounds = event.num_rounds
                    self.num_made = event.first_round - 1
                elif num_new > 0:
                    # A personaliser with a state of its own has another training.
                    self.num_rounds = self.num_made + num_new
            case RunStage.ROUND:
                self.num_made += 1
            case RunStage.ENDED:
                self.num_missing -= 1
                self.num_rounds = self.num_made  # no further rounds after divergence


class Tracker:
    """Follows the events of workers through the stages of a batch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._states: list[_FamilyState] = []
        self._missing: list[_FamilyState] = []
        self._later: list[_FamilyState] = []
        self._num_before = self._num_done = self._at_start = 0

    def expect(
        self, families: Sequence[Family], later: Sequence[Family] = ()
    ) -> list[Family]:
        """Begin a stage; return the families with missing runs.

        ``later``: The families of later stages that are known already.
        """
        self._num_before += self.num_steps
        self._states = list(map(_initial_state, families))
        self._later = list(map(_initial_state, later))
        self._missing = [state for state in self._states if state.num_missing]
        self._at_start += self.num_done
        pairs = zip(families, self._states, strict=True)
        return [family for family, state in pairs if state.num_missing]

    def handle(self, events: Iterable[FamilyEvent]) -> None:
        """Take workers' events; families are numbered as `expect` returned them."""
        for number, event in events:
            self._missing[number].handle(event)

    @property
    def num_steps(self) -> int:
        """The steps of the stage's families."""
        return sum(state.num_steps for state in self._states)

    @property
    def num_done(self) -> int:
        """The stage's steps that are done."""
        return sum(state.num_done for state in self._states)

    def progress(self) -> Progress:
        """Return the progress over all stages."""
        # A resumed run repeats the rounds since its last checkpoint; they count once.
        self._num_done = max(self._num_done, self._num_before + self.num_done)
        total = self._num_before + self.num_steps
        total += sum(state.num_steps for state in self._later)
        remaining = seconds_left(
            self._began, self._clock(), self._num_done, total, self._at_start
        )
        return Progress(self._num_done, total, self._at_start, remaining)


def _initial_state(family: Family) -> _FamilyState:
    num_missing = sum(not is_done(folder) for folder in family.runs)
    state = _FamilyState(len(family.runs), num_missing, family.num_rounds)
    if num_missing < len(family.runs) or family.earlier is not None:
        state.num_made = family.num_rounds
    else:
        num_made = max(len(RunFolder(folder).rounds()) for folder in family.runs)
        state.num_made = min(num_made, family.num_rounds)
    return state
