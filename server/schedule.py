"""Which clients take part in a step of the server, with which model, until when.

Without ``training.devices`` a step is a round with clients that are sampled. With it
there is virtual time. A client's round takes as long as its device and its link need
for what it is sent, for all examples that it trains on, and for what it sends. While it
is not available it pauses. Time changes only which clients take part with which model.
The schedule follows from settings, seed and sizes alone, before anything is trained, so
it is the same for any number of workers, and after a resume.

A step is one of these:

- synchronous: available clients are sampled, and all are waited for;
- the same with more clients than needed (`over_selection`) or a `deadline_s`: the first
  replies count, and the others are dropped (Bonawitz et al. 2019, section 2.2);
- buffered: a fixed number of clients train at any time, and whenever `buffer_size` of
  them have replied, the server makes a step (FedBuff, Nguyen et al. 2022, Algorithm 1).

A client that failed is named in the step, and does not count for its size.
"""

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from knnper.errors import RunError
from knnper.experiment import (
    BufferedTiming,
    SynchronousTiming,
    TrainingSettings,
)
from knnper.records import Parts, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.server.fleet import Cohort, Devices, Fleet, VirtualFleet
from knnper.server.selection import ClientSelection, selection_of
from knnper.strategies.core.method import Method, origins

_ROUNDING = 1e-6
_TRIES = 32  # before looking at all clients; each idle client is equally likely


def num_participants(num_clients: int, participation: float) -> int:
    """Return the number of ``num_clients`` that take part: rounded, at least 1."""
    return max(1, int(participation * num_clients + 0.5))


class Schedule(ABC):
    """Decides which clients take part in each step."""

    @abstractmethod
    def cohort(self, step: int) -> Cohort:
        """Return the cohort of a step, counted from 1."""

    def learn(self, gains: Sequence[Mapping[str, float]]) -> None:  # noqa: B027
        """Note the gains of each step so far, see `ClientSelection.learn`."""

    def needed_after(self, step: int) -> frozenset[int]:  # noqa: ARG002
        """Return the steps with models that clients still train after this step."""
        return frozenset()

    def busy(self) -> Collection[str]:
        """Return the clients that are training and would not reply soon."""
        return ()

    def client_figures(self, num_steps: int) -> Mapping[str, Mapping[str, float]]:  # noqa: ARG002
        """Return figures by client after ``num_steps``; none without time."""
        return {}


@dataclass(frozen=True)
class RoundSchedule(Schedule):
    """Rounds without time: clients are sampled for each."""

    clients: Sequence[str]
    fraction: float
    selection: ClientSelection

    @override
    def cohort(self, step: int) -> Cohort:
        count = num_participants(len(self.clients), self.fraction)
        drawn = self.selection.draw(self.clients, count, step)
        return Cohort(dict.fromkeys(drawn, step - 1))

    @override
    def learn(self, gains: Sequence[Mapping[str, float]]) -> None:
        self.selection.learn(gains)


class TimedSchedule(Schedule):
    """A schedule of clients over time, made step by step."""

    def __init__(self, fleet: Fleet, participation: float, first_step: int = 1) -> None:
        self._fleet, self._clients = fleet, sorted(fleet.sizes)
        self._count = num_participants(len(self._clients), participation)
        self._made: dict[int, tuple[Cohort, frozenset[int]]] = {}
        self._steps = zip(itertools.count(first_step), self._run(first_step))

    @override
    def cohort(self, step: int) -> Cohort:
        return self._until(step)[0]

    @override
    def needed_after(self, step: int) -> frozenset[int]:
        return self._until(step)[1] if step else frozenset()

    @override
    def busy(self) -> Collection[str]:
        return self._fleet.busy()

    @override
    def client_figures(self, num_steps: int) -> Mapping[str, Mapping[str, float]]:
        staleness: dict[str, list[int]] = {client: [] for client in self._clients}
        for step in range(1, num_steps + 1):
            for client, version in self.cohort(step).versions.items():
                staleness[client].append(step - 1 - version)
        return {
            client: {
                "num_rounds": len(staleness),
                **self._fleet.figures(client),
                **({"staleness": statistics.fmean(staleness)} if staleness else {}),
            }
            for client, staleness in staleness.items()
        }

    def _until(self, step: int) -> tuple[Cohort, frozenset[int]]:
        while step not in self._made:
            number, cohort = next(self._steps)
            self._made[number] = cohort
        return self._made[step]

    @abstractmethod
    def _run(self, first_step: int) -> Iterator[tuple[Cohort, frozenset[int]]]:
        """Yield for each step its cohort, and the steps with models still in use."""


class SynchronousSchedule(TimedSchedule):
    """Rounds that end with their last client, or at a deadline."""

    def __init__(
        self,
        fleet: Fleet,
        participation: float,
        timing: SynchronousTiming,
        selection: ClientSelection,
        first_step: int = 1,
    ) -> None:
        super().__init__(fleet, participation, first_step)
        self._timing, self._selection = timing, selection

    @override
    def learn(self, gains: Sequence[Mapping[str, float]]) -> None:
        self._selection.learn(gains)

    def _run(self, first_step: int) -> Iterator[tuple[Cohort, frozenset[int]]]:
        fleet = self._fleet
        # In floating point, 100 times 1.1 is a little more than 110.
        most = math.ceil(self._count * self._timing.over_selection - _ROUNDING)
        for step in itertools.count(first_step):
            while not (available := fleet.available()):
                fleet.next_answer(awaited=self._clients)
            drawn = self._selection.draw(available, min(most, len(available)), step)
            deadline_s = fleet.now_s + (self._timing.deadline_s or math.inf)
            for client in drawn:
                fleet.begin(client, step - 1)
            counted: list[str] = []
            num_good, needed = 0, min(self._count, len(drawn))
            while num_good < needed and len(counted) < len(drawn):
                # If all clients are late, the first one counts.
                first = fleet.next_answer(deadline_s if num_good else math.inf)
                if first is None:
                    break
                counted.append(first)
                num_good += not fleet.failed(first)
            late = set(drawn) - set(counted)
            fleet.forget(late)
            versions = dict.fromkeys(sorted(counted), step - 1)
            yield fleet.cohort(versions, len(late)), frozenset()


class BufferedSchedule(TimedSchedule):
    """Steps made of the first replies, while other clients continue to train."""

    def __init__(
        self,
        fleet: Fleet,
        participation: float,
        buffer_size: int,
        first_step: int = 1,
    ) -> None:
        super().__init__(fleet, participation, first_step)
        if buffer_size > len(self._clients):
            raise RunError(
                f"training.timing.buffer_size: found {buffer_size}, expected at most "
                f"the {len(self._clients)} clients that train"
            )
        self._buffer_size = buffer_size

    def _run(self, first_step: int) -> Iterator[tuple[Cohort, frozenset[int]]]:
        fleet, num_drawn = self._fleet, 0
        under_way: dict[str, int] = {}  # version of the model
        arrived: dict[str, int] = {}
        busy: set[str] = set()  # training, or replied
        for step in itertools.count(first_step):
            num_failed = 0
            while len(arrived) - num_failed < self._buffer_size:
                idle: Iterable[str] = ()
                while len(under_way) < self._count:
                    num_drawn += 1
                    client = self._idle(busy, num_drawn)
                    if client is None:
                        # A client may become available before the next reply.
                        idle = [
                            client for client in self._clients if client not in busy
                        ]
                        break
                    busy.add(client)
                    under_way[client] = step - 1
                    fleet.begin(client, step - 1)
                if num_failed and not under_way:
                    break  # no other client could replace those that failed
                answered = fleet.next_answer(awaited=idle)
                if answered is not None:
                    arrived[answered] = under_way.pop(answered)
                    num_failed += fleet.failed(answered)
            needed = frozenset(under_way.values()) - {step}
            yield fleet.cohort(dict(sorted(arrived.items())), 0), needed
            busy -= arrived.keys()
            arrived.clear()

    def _idle(self, busy: Collection[str], number: int) -> str | None:
        """Sample an available client that does not train, uniformly."""
        generator = self._fleet.key.child("next client", number).numpy()
        for position in map(int, generator.integers(len(self._clients), size=_TRIES)):
            client = self._clients[position]
            if client not in busy and self._fleet.is_available(client):
                return client
        idle = [client for client in self._fleet.available() if client not in busy]
        return idle[int(generator.integers(len(idle)))] if idle else None


def participation_of(
    rounds: Iterable[Mapping[str, Any]],
) -> Mapping[str, Mapping[str, float]]:
    """Return each client's number of rounds and mean staleness."""
    staleness: dict[str, list[int]] = {}
    for record in rounds:
        for client, of_client in record.get("participants", {}).items():
            staleness.setdefault(client, []).append(of_client)
    return {
        client: {"num_rounds": len(staleness), "staleness": statistics.fmean(staleness)}
        for client, staleness in staleness.items()
    }


def schedule_of(
    training: TrainingSettings,
    clients: Mapping[str, int],
    method: Method,
    key: RandomKey,
) -> Schedule:
    """Make the schedule of a run; ``sizes`` are training examples by client."""
    if training.devices is None:
        selection = selection_of(training, key)
        return RoundSchedule(sorted(clients), training.participation, selection)
    fleet = VirtualFleet(Devices(training, clients, method, key))
    return scheduled(fleet, training)


def scheduled(
    fleet: Fleet, training: TrainingSettings, first_step: int = 1
) -> TimedSchedule:
    """Make the schedule of clients over time."""
    timing, participation = training.timing, training.participation
    if isinstance(timing, BufferedTiming):
        size = timing.buffer_size
        return BufferedSchedule(fleet, participation, size, first_step)

    def durations() -> Mapping[str, float]:
        known = {client: fleet.figures(client) for client in fleet.sizes}
        return {
            client: figures["round_seconds"]
            for client, figures in known.items()
            if figures
        }

    selection = selection_of(training, fleet.key, durations)
    return SynchronousSchedule(fleet, participation, timing, selection, first_step)


def staleness_factor(timing: BufferedTiming, staleness: int) -> float:
    """Return s(τ) = η (1 + τ)^-a (Nguyen et al. 2022, section 5.1; η is the server's).

    ``staleness``: τ, the steps since the client was sent its model.
    """
    return float(timing.server_rate * (1 + staleness) ** -timing.staleness_exponent)


def rebased(method: Method, update: Any, then: Any, now: Any, factor: float) -> Any:
    """Convert an update as if its client had started from the present model.

    w' = w_now + s (w_m - w_then) for each tensor that started from a sent tensor.
    Buffers such as running variances, which may not be extrapolated, are in between:
    w' = w_now + s (w_m - w_now). With s = 1 the difference is taken as it is.

    Parameters
    ----------
    update
        The method's record, as `Method.aggregate` takes it.
    then, now
        The payload that the client was sent, and the present payload.
    factor
        s, see `staleness_factor`.
    """
    old, new = (origins(method, payload, update) for payload in (then, now))
    parts = take_apart(update)
    tensors = dict(parts.tensors)
    for path, tensor in parts.tensors.items():
        if path not in old or path not in new:
            continue
        start, present = old[path], new[path]
        if not tensor.shape == start.shape == present.shape:
            continue
        flat, count = tensor.reshape(-1), method.num_coordinates(tensor)
        base = torch.cat([start.reshape(-1)[:count], present.reshape(-1)[count:]])
        moved = present.reshape(-1) + factor * (flat - base)
        tensors[path] = moved.view(tensor.shape)
    return put_together(type(update), Parts(tensors, parts.structure))
