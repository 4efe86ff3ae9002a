"""Who takes part in a step of the server, with which of its models, and when that ends.

Without ``training.devices`` a step is a round: its clients are drawn, and that is all.
With it there is virtual time. A client's round takes as long as its device and its link
need for what it is sent, for all examples that it trains on, and for what it sends.
While it is not available it does nothing, and goes on when it is back. That changes no
number that is computed, only who takes part with which model. It follows from settings,
seed and sizes alone, before anything is trained: it is the same for any number of
workers, and after a resume.

A step is one of these:

- synchronous: clients are drawn from those that are available, and all are waited for;
- the same with more clients than needed (`over_selection`) or a `deadline_s`: the first
  ones count, and nobody waits for the others (Bonawitz et al. 2019, section 2.2);
- buffered: so many clients train at any time, and whenever `buffer_size` of them have
  answered, the server makes a step (FedBuff, Nguyen et al. 2022, Algorithm 1).
"""

import bisect
import heapq
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from knnper.errors import RunError
from knnper.experiment import (
    BufferedTiming,
    SynchronousTiming,
    TrainingSettings,
)
from knnper.records import Parts, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, origins


def num_participants(num_clients: int, participation: float) -> int:
    """Return how many of ``num_clients`` take part: the nearest integer, at least 1."""
    return max(1, int(participation * num_clients + 0.5))


def draw(
    clients: Sequence[str], count: int, server_round: int, key: RandomKey
) -> list[str]:
    """Return clients of a round, uniformly without replacement, sorted by name."""
    generator = key.child("participants", server_round).numpy()
    chosen = generator.choice(len(clients), size=count, replace=False)
    return sorted(clients[position] for position in chosen)


@dataclass(frozen=True)
class Cohort:
    """Whose updates a step is made of.

    Attributes
    ----------
    versions
        By client, after which step the model was that it was sent.
    ended_s
        Virtual seconds from the run's beginning to the step; None without a clock.
    num_late
        Clients that trained for nothing, as nobody waited for them.
    """

    versions: Mapping[str, int]
    ended_s: float | None = None
    num_late: int = 0


class Schedule(ABC):
    """Who takes part in each step."""

    @abstractmethod
    def cohort(self, step: int) -> Cohort:
        """Return who takes part in a step (from 1)."""

    def needed_after(self, step: int) -> frozenset[int]:  # noqa: ARG002
        """Return the earlier steps whose models clients still train when it is over."""
        return frozenset()

    def client_figures(self, num_steps: int) -> Mapping[str, Mapping[str, float]]:  # noqa: ARG002
        """Return figures of clients by name, after so many steps; none without time."""
        return {}


@dataclass(frozen=True)
class Rounds(Schedule):
    """Rounds without time."""

    clients: Sequence[str]
    fraction: float
    key: RandomKey

    def cohort(self, step: int) -> Cohort:
        """See `Schedule.cohort`."""
        count = num_participants(len(self.clients), self.fraction)
        drawn = draw(self.clients, count, step, self.key)
        return Cohort(dict.fromkeys(drawn, step - 1))


class TimedSchedule(Schedule):
    """A schedule on virtual time, made step after step."""

    def __init__(self, devices: "Devices", participation: float) -> None:
        self._devices, self._clients = devices, sorted(devices.sizes)
        self._count = num_participants(len(self._clients), participation)
        self._made: list[tuple[Cohort, frozenset[int]]] = []
        self._steps = self._run()

    def cohort(self, step: int) -> Cohort:
        """See `Schedule.cohort`."""
        return self._until(step)[0]

    def needed_after(self, step: int) -> frozenset[int]:
        """See `Schedule.needed_after`."""
        return self._until(step)[1] if step else frozenset()

    def client_figures(self, num_steps: int) -> Mapping[str, Mapping[str, float]]:
        """See `Schedule.client_figures`."""
        staleness: dict[str, list[int]] = {client: [] for client in self._clients}
        for step in range(1, num_steps + 1):
            for client, version in self.cohort(step).versions.items():
                staleness[client].append(step - 1 - version)
        return {
            client: {
                "num_rounds": len(found),
                "round_seconds": self._devices.work_s(client),
                **({"staleness": statistics.fmean(found)} if found else {}),
            }
            for client, found in staleness.items()
        }

    def _until(self, step: int) -> tuple[Cohort, frozenset[int]]:
        while len(self._made) < step:
            self._made.append(next(self._steps))
        return self._made[step - 1]

    @abstractmethod
    def _run(self) -> Iterator[tuple[Cohort, frozenset[int]]]:
        """Yield the steps: the cohort, and what is needed after it."""


class SynchronousSchedule(TimedSchedule):
    """Rounds that end with their last client, or sooner."""

    def __init__(
        self, devices: "Devices", participation: float, timing: SynchronousTiming
    ) -> None:
        super().__init__(devices, participation)
        self._timing = timing

    def _run(self) -> Iterator[tuple[Cohort, frozenset[int]]]:
        devices, now_s = self._devices, 0.0
        most = math.ceil(self._count * self._timing.over_selection)
        for step in itertools.count(1):
            while not (there := devices.there(now_s)):
                now_s = devices.first_back_s(self._clients, now_s)
            drawn = draw(there, min(most, len(there)), step, devices.key)
            ends = sorted((devices.finished_s(one, now_s), one) for one in drawn)
            counted = ends[: self._count]
            deadline_s = now_s + (self._timing.deadline_s or math.inf)
            # Of a round in which all are late, the first one counts.
            counted = [one for one in counted if one[0] <= deadline_s] or ends[:1]
            is_cut = len(counted) < min(self._count, len(ends))
            now_s = max(counted[-1][0], deadline_s if is_cut else 0.0)
            names = sorted(client for _, client in counted)
            cohort = Cohort(
                dict.fromkeys(names, step - 1), now_s, len(ends) - len(counted)
            )
            yield cohort, frozenset()


class BufferedSchedule(TimedSchedule):
    """Steps of so many answers as they come in, while the others go on training."""

    def __init__(
        self, devices: "Devices", participation: float, buffer_size: int
    ) -> None:
        super().__init__(devices, participation)
        if buffer_size > len(self._clients):
            raise RunError(
                f"training.timing.buffer_size: found {buffer_size}, expected at most "
                f"the {len(self._clients)} clients that train"
            )
        self._buffer_size = buffer_size

    def _run(self) -> Iterator[tuple[Cohort, frozenset[int]]]:
        devices, now_s, num_drawn = self._devices, 0.0, 0
        under_way: list[tuple[float, str, int]] = []  # (when it ends, client, version)
        arrived: dict[str, int] = {}
        busy: set[str] = set()  # under way, or arrived
        for step in itertools.count(1):
            while len(arrived) < self._buffer_size:
                while len(under_way) < self._count:
                    num_drawn += 1
                    client = self._idle(now_s, busy, num_drawn)
                    if client is None:
                        break
                    busy.add(client)
                    end_s = devices.finished_s(client, now_s)
                    heapq.heappush(under_way, (end_s, client, step - 1))
                if len(under_way) < self._count:
                    # Someone may be back before the next one is done.
                    idle = (one for one in self._clients if one not in busy)
                    back_s = devices.first_back_s(idle, now_s)
                    if not under_way or back_s < under_way[0][0]:
                        now_s = back_s
                        continue
                now_s, client, version = heapq.heappop(under_way)
                arrived[client] = version
            ordered = dict(sorted(arrived.items()))
            needed = frozenset(version for _, _, version in under_way)
            yield Cohort(ordered, now_s), needed - {step}
            busy -= arrived.keys()
            arrived.clear()

    def _idle(self, now_s: float, busy: Collection[str], number: int) -> str | None:
        """Return a client that is available and does nothing, drawn uniformly."""
        generator = self._devices.key.child("next client", number).numpy()
        for position in map(int, generator.integers(len(self._clients), size=_TRIES)):
            client = self._clients[position]
            if client not in busy and self._devices.is_there(client, now_s):
                return client
        idle = [one for one in self._devices.there(now_s) if one not in busy]
        return idle[int(generator.integers(len(idle)))] if idle else None


_TRIES = 32  # before all clients are looked at; of those that fit each is as likely


def schedule_of(
    training: TrainingSettings,
    clients: Mapping[str, int],
    method: Method,
    key: RandomKey,
) -> Schedule:
    """Return who takes part when, of clients with so many training examples each."""
    if training.devices is None:
        return Rounds(sorted(clients), training.participation, key)
    devices = Devices(training, clients, method, key)
    timing, participation = training.timing, training.participation
    if isinstance(timing, BufferedTiming):
        return BufferedSchedule(devices, participation, timing.buffer_size)
    return SynchronousSchedule(devices, participation, timing)


_Z_975 = 1.959964
"""Of a normal distribution, 95 % lie within so many standard deviations."""


@dataclass
class _Presence:
    """When a client is there: the ends of the times in which it is, and is not."""

    lengths: Iterator[float]
    ends_s: list[float] = field(default_factory=list)

    def turn(self, at_s: float) -> int:
        """Return the number of the time that ``at_s`` is in, odd if it is away."""
        while not self.ends_s or self.ends_s[-1] <= at_s:
            latest = self.ends_s[-1] if self.ends_s else 0.0
            self.ends_s.append(latest + next(self.lengths))
        return bisect.bisect_right(self.ends_s, at_s)


class Devices:
    """How fast the clients are, and when they are there."""

    def __init__(
        self,
        training: TrainingSettings,
        sizes: Mapping[str, int],
        method: Method,
        key: RandomKey,
    ) -> None:
        if training.devices is None:
            raise ValueError("expected training.devices")
        self.sizes, self.key = sizes, key
        self._settings, self._training = training.devices, training
        self._bytes_down = method.task.initial_weights.nbytes
        self._bytes_up = method.bytes_up()
        self._presences: dict[str, _Presence] = {}

    def work_s(self, client: str) -> float:
        """Return how long a round takes a client that is there all the time."""
        one = self._settings
        generator = self.key.child("device", client).numpy()
        speed, link = (
            math.exp(generator.normal() * math.log(spread) / (2 * _Z_975))
            for spread in (one.speed_spread, one.link_spread)
        )
        seconds = self._num_examples(client) / (one.examples_per_s * speed)
        for num_bytes, rate in (
            (self._bytes_down, one.bytes_down_per_s),
            (self._bytes_up, one.bytes_up_per_s),
        ):
            seconds += 0.0 if rate is None else num_bytes / (rate * link)
        return seconds

    def there(self, at_s: float) -> list[str]:
        """Return the clients that are available, sorted."""
        return sorted(one for one in self.sizes if self.is_there(one, at_s))

    def is_there(self, client: str, at_s: float) -> bool:
        """Return whether a client is available."""
        return self.back_s(client, at_s) == at_s

    def back_s(self, client: str, at_s: float) -> float:
        """Return from when on a client is available, at the earliest ``at_s``."""
        if self._settings.available == 1:
            return at_s
        presence = self._presence(client)
        turn = presence.turn(at_s)
        return presence.ends_s[turn] if turn % 2 else at_s

    def first_back_s(self, clients: Iterable[str], at_s: float) -> float:
        """Return from when on one of the clients is available; inf for none."""
        return min((self.back_s(one, at_s) for one in clients), default=math.inf)

    def finished_s(self, client: str, at_s: float) -> float:
        """Return when a client is done that gets its work at ``at_s``."""
        left = self.work_s(client)
        if self._settings.available == 1:
            return at_s + left
        presence = self._presence(client)
        while True:
            at_s = self.back_s(client, at_s)
            end_s = presence.ends_s[presence.turn(at_s)]
            if at_s + left <= end_s:
                return at_s + left
            left -= end_s - at_s
            at_s = end_s

    def _presence(self, client: str) -> _Presence:
        if client not in self._presences:
            one = self._settings
            generator = self.key.child("availability", client).numpy()
            means = one.period_s * one.available, one.period_s * (1 - one.available)
            # As if it had always gone on: at 0 so large a part is there.
            first = [] if generator.random() < one.available else [0.0]
            self._presences[client] = _Presence(
                (
                    generator.exponential(means[number % 2])
                    for number in itertools.count(len(first))
                ),
                first,
            )
        return self._presences[client]

    def _num_examples(self, client: str) -> int:
        """Return how many examples a client trains on in a round, each time counted."""
        training, size = self._training, self.sizes[client]
        if training.local_steps is not None:
            return training.local_steps * min(size, training.batch_size)
        return (training.local_epochs or 1) * size


def staleness_factor(timing: BufferedTiming, staleness: int) -> float:
    """Return s(τ) = η (1 + τ)^-a (Nguyen et al. 2022, section 5.1; η is the server's).

    ``staleness``: τ, the steps that were made since the client was sent its model.
    """
    return float(timing.server_rate * (1 + staleness) ** -timing.staleness_exponent)


def rebased(method: Method, update: Any, then: Any, now: Any, factor: float) -> Any:
    """Return an update as if its client had started from the present model.

    w' = w_now + s (w_m - w_then) for each tensor that started from one that was sent.
    Buffers such as running variances, which may not be extrapolated, are in between:
    w' = w_now + s (w_m - w_now). With s = 1 the difference is taken as it is.

    Parameters
    ----------
    update
        Of the method, as `Method.aggregate` takes it.
    then, now
        The payload that the client was sent, and the one that it would be sent.
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
