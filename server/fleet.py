"""Virtual and real clients over time: available, training, and replying."""

import bisect
import heapq
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.server.federation import LiveFederation, Reply, Request, Step
from knnper.server.traces import Traces
from knnper.strategies.core.method import Method
from knnper.strategies.core.training import num_steps
from knnper.transport.messages import Purpose
from knnper.transport.polling import Interrupted

# 95 % of a normal distribution lie within this many standard deviations.
_Z_975 = 1.959964
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Cohort:
    """The clients that contribute updates to a step of the server.

    Attributes
    ----------
    versions
        By client, the step after which its model was the global one.
    ended_s
        Virtual seconds from the run's beginning to the step; None without a clock.
    num_late
        Clients with an update that came too late to count.
    num_asked
        Clients that the allowed fraction of failures refers to; None for the clients
        of the step.
    replies
        Replies of real clients; None where requests are still to be sent.
    """

    versions: Mapping[str, int]
    ended_s: float | None = None
    num_late: int = 0
    num_asked: int | None = None
    replies: Mapping[str, Reply] | None = None


class Fleet(ABC):
    """Clients that train on request and reply after a while."""

    sizes: Mapping[str, int]  # training examples
    key: RandomKey

    @property
    @abstractmethod
    def now_s(self) -> float:
        """Present time in seconds, from any origin."""

    @abstractmethod
    def is_available(self, client: str) -> bool:
        """Return whether a client can begin to train."""

    def available(self) -> list[str]:
        """Return the clients that can begin to train, sorted."""
        return sorted(client for client in self.sizes if self.is_available(client))

    @abstractmethod
    def begin(self, client: str, version: int) -> None:
        """Let a client train with the global model after step ``version``."""

    @abstractmethod
    def next_answer(
        self, until_s: float = math.inf, awaited: Iterable[str] = ()
    ) -> str | None:
        """Wait for a reply, an available client of ``awaited``, or ``until_s``.

        Returns the client that replied, or None.
        """

    def failed(self, client: str) -> bool:  # noqa: ARG002
        """Return whether a client replied with a failure."""
        return False

    @abstractmethod
    def forget(self, clients: Collection[str]) -> None:
        """Drop the updates of these clients when they arrive."""

    @abstractmethod
    def cohort(self, versions: Mapping[str, int], num_late: int) -> Cohort:
        """Make the cohort of a step, from clients that have replied."""

    def busy(self) -> Collection[str]:
        """Return the clients that are training and cannot reply to anything else."""
        return ()

    def figures(self, client: str) -> Mapping[str, float]:  # noqa: ARG002
        """Return figures about a client's time, by name."""
        return {}


class VirtualFleet(Fleet):
    """Virtual clients, with training times that are known in advance."""

    def __init__(self, devices: "Devices") -> None:
        self.sizes, self.key = devices.sizes, devices.key
        self._devices, self._all, self._now_s = devices, sorted(devices.sizes), 0.0
        self._under_way: list[tuple[float, str]] = []  # end time, client

    @property
    @override
    def now_s(self) -> float:
        """Virtual seconds since the run began."""
        return self._now_s

    @override
    def is_available(self, client: str) -> bool:
        """Return whether a client is available, even if it trains."""
        return self._devices.is_available(client, self._now_s)

    @override
    def available(self) -> list[str]:
        return self._all if self._devices.are_always_available else super().available()

    @override
    def begin(self, client: str, version: int) -> None:
        end_s = self._devices.finished_s(client, self._now_s)
        heapq.heappush(self._under_way, (end_s, client))

    @override
    def next_answer(
        self, until_s: float = math.inf, awaited: Iterable[str] = ()
    ) -> str | None:
        back_s = self._devices.first_back_s(awaited, self._now_s)
        until_s = max(self._now_s, min(until_s, back_s))
        if self._under_way and self._under_way[0][0] <= until_s:
            self._now_s, client = heapq.heappop(self._under_way)
            return client
        self._now_s = until_s
        return None

    @override
    def forget(self, clients: Collection[str]) -> None:
        """Drop these clients, which are then never trained at all."""
        self._under_way = [task for task in self._under_way if task[1] not in clients]
        heapq.heapify(self._under_way)

    @override
    def cohort(self, versions: Mapping[str, int], num_late: int) -> Cohort:
        return Cohort(versions, self._now_s, num_late)

    @override
    def figures(self, client: str) -> Mapping[str, float]:
        return {"round_seconds": self._devices.work_s(client)}


@dataclass
class _Availability:
    """Ends of the periods in which a client is and is not available, in turn."""

    ends: Iterator[float]
    ends_s: list[float] = field(default_factory=list)  # known so far

    def turn(self, at_s: float) -> int:
        """Return the number of the period at ``at_s``; odd if unavailable."""
        while not self.ends_s or self.ends_s[-1] <= at_s:
            self.ends_s.append(next(self.ends))
        return bisect.bisect_right(self.ends_s, at_s)


class Devices:
    """Speed and availability of virtual clients."""

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
        self._method = method
        self._traces = Traces(training.devices, key)
        self.are_always_available = (
            training.devices.available == 1 and not self._traces.has_times
        )
        self._presences: dict[str, _Availability] = {}

    def work_s(self, client: str) -> float:
        """Return the seconds of a round for a client that is always available."""
        settings = self._settings
        spreads = settings.speed_spread, settings.link_spread
        speed, link = (
            math.exp(deviations * math.log(spread) / (2 * _Z_975))
            for deviations, spread in zip(self.key.device(client), spreads, strict=True)
        )
        method, device = self._method, self._traces.device(client)
        count = self._num_examples(client) * method.work(client)
        if device.seconds_per_example is None:
            seconds = count / (settings.examples_per_s * speed)
        else:
            seconds = count * device.seconds_per_example
        for num_bytes, measured, rate in (
            (
                4 * method.num_weights(client),
                device.bytes_down_per_s,
                settings.bytes_down_per_s,
            ),
            (method.bytes_up(client), device.bytes_up_per_s, settings.bytes_up_per_s),
        ):
            if measured is not None:
                seconds += num_bytes / measured
            elif rate is not None:
                seconds += num_bytes / (rate * link)
        return seconds

    def is_available(self, client: str, at_s: float) -> bool:
        """Return whether a client is available."""
        return self.back_s(client, at_s) == at_s

    def back_s(self, client: str, at_s: float) -> float:
        """Return the first time from ``at_s`` on at which a client is available."""
        presence = self._presence(client)
        if presence is None:
            return at_s
        turn = presence.turn(at_s)
        return presence.ends_s[turn] if turn % 2 else at_s

    def first_back_s(self, clients: Iterable[str], at_s: float) -> float:
        """Return the first time at which any of the clients is available, or inf."""
        return min((self.back_s(client, at_s) for client in clients), default=math.inf)

    def finished_s(self, client: str, at_s: float) -> float:
        """Return when a client finishes a round that it is sent at ``at_s``."""
        remaining_s = self.work_s(client)
        presence = self._presence(client)
        if presence is None:
            return at_s + remaining_s
        while True:
            at_s = self.back_s(client, at_s)
            end_s = presence.ends_s[presence.turn(at_s)]
            if at_s + remaining_s <= end_s:
                return at_s + remaining_s
            remaining_s -= end_s - at_s
            at_s = end_s

    def _presence(self, client: str) -> _Availability | None:
        """Return a client's periods; None if it is always available."""
        if self.are_always_available:
            return None
        if client not in self._presences:
            times = self._traces.times(client)
            ends = self._random_ends(client) if times is None else times.ends()
            self._presences[client] = _Availability(ends)
        return self._presences[client]

    def _random_ends(self, client: str) -> Iterator[float]:
        settings = self._settings
        generator = self.key.child("availability", client).numpy()
        means = (
            settings.period_s * settings.available,
            settings.period_s * (1 - settings.available),
        )
        # Stationary from the start: at time 0 this part of the clients is available.
        is_available = generator.random() < settings.available
        lengths = (
            generator.exponential(means[number % 2])
            for number in itertools.count(0 if is_available else 1)
        )
        return itertools.accumulate(lengths, initial=None if is_available else 0.0)

    def _num_examples(self, client: str) -> int:
        """Return the examples that a client processes in a round, with repetitions."""
        training, size = self._training, self.sizes[client]
        return num_steps(training, None, size) * min(size, training.batch_size)


class LiveFleet(Fleet):
    """Real clients, with unknown training times."""

    def __init__(
        self,
        federation: LiveFederation,
        sizes: Mapping[str, int],
        key: RandomKey,
        request: Callable[[str, int], Request],
    ) -> None:
        self.sizes, self.key = sizes, key
        self._federation, self._request = federation, request
        self._at_work: set[str] = set()
        self._forgotten: set[str] = set()
        self._answered: deque[str] = deque()
        self._replies: dict[str, Reply] = {}

    @property
    @override
    def now_s(self) -> float:
        return time.monotonic()

    @override
    def is_available(self, client: str) -> bool:
        return client not in self._at_work and self._federation.is_available(client)

    @override
    def begin(self, client: str, version: int) -> None:
        self._at_work.add(client)
        step = Step(Purpose.TRAIN, version + 1, ())
        self._federation.begin(step, self._request(client, version))

    @override
    def next_answer(
        self, until_s: float = math.inf, awaited: Iterable[str] = ()
    ) -> str | None:
        """Wait for a reply, an available client of ``awaited``, or ``until_s``.

        Raises
        ------
        RunError
            No client trains, and none became available for `wait_for_clients_s`.
        """
        awaited, began_s = list(awaited), self.now_s
        while True:
            self._look()
            if self._answered:
                return self._answered.popleft()
            if self.now_s >= until_s or any(map(self.is_available, awaited)):
                return None
            if not self._at_work:
                self._federation.require_client(awaited, self.now_s - began_s)
            if self._federation.stop.wait(LOOK_EVERY_S):
                raise Interrupted("stopped while clients were working")

    @override
    def failed(self, client: str) -> bool:
        return bool(self._replies[client].failure)

    @override
    def forget(self, clients: Collection[str]) -> None:
        """Drop their updates when they arrive."""
        self._forgotten |= self._at_work & set(clients)
        for client in [name for name in self._answered if name in clients]:
            self._answered.remove(client)
            del self._replies[client]

    @override
    def cohort(self, versions: Mapping[str, int], num_late: int) -> Cohort:
        replies = {client: self._replies.pop(client) for client in versions}
        num_asked = len(versions) + len(self._at_work)
        return Cohort(versions, None, num_late, num_asked, replies)

    @override
    def busy(self) -> Collection[str]:
        return frozenset(self._at_work)

    def _look(self) -> None:
        for reply in self._federation.answered():
            client = reply.client
            self._at_work.remove(client)
            if client in self._forgotten:
                self._forgotten.remove(client)
            else:
                self._replies[client] = reply
                self._answered.append(client)
