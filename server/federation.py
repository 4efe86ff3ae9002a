"""Clients as the server sees them: requests that are sent to them, and replies."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from knnper.secure.messages import MaskRequest
from knnper.transport.messages import Purpose


@dataclass(frozen=True)
class _OfClients:
    clients: tuple[str, ...]

    @property
    def client(self) -> str:
        """The name of the only client."""
        (name,) = self.clients
        return name


@dataclass(frozen=True)
class Request(_OfClients):
    """A request to clients.

    Attributes
    ----------
    payload
        The method's record, the same for all clients of the request.
    reference
        Payload of the unpersonalised model, for evaluation beside it.
    seen
        Whether the clients took part in training.
    state_rounds
        By client, the round after which its state is current.
    server_round
        Round of a training: the one after the payload's model; 0 for the round of the
        step, in which the update counts.
    masking
        Asks for the masked update, in a training with secure aggregation.
    """

    payload: object
    reference: object | None = None
    seen: bool = True
    state_rounds: tuple[int, ...] = ()
    server_round: int = 0
    masking: MaskRequest | None = None


@dataclass(frozen=True)
class Reply(_OfClients):
    """The reply to a request: a record, or why it failed."""

    record: Any
    failure: str | None = None


class Step(NamedTuple):
    """Purpose and round of requests.

    ``keep_rounds`` are the rounds after which clients keep their states.
    """

    purpose: Purpose
    server_round: int
    keep_rounds: Sequence[int]


class Federation(ABC):
    """The clients as the server sees them.

    Attributes
    ----------
    round_attempts
        How often a round is made, at most, when too many clients fail.
    may_be_away
        Whether clients may be offline.
    trusts_clients
        True for virtual clients, which the run itself makes.
    """

    round_attempts: int = 1
    may_be_away: bool = False
    trusts_clients: bool = True

    def await_clients(self, clients: Sequence[str], least: int) -> None:  # noqa: B027
        """Wait until at least ``least`` of ``clients`` are online."""

    @abstractmethod
    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send requests, and yield the replies in the order of the requests."""

    def is_available(self, client: str) -> bool:  # noqa: ARG002
        """Return whether a client is online."""
        return True


class LiveFederation(Federation):
    """A federation that also sends requests without waiting for their replies.

    Attributes
    ----------
    stop
        Set to end the run.
    """

    stop: threading.Event

    @abstractmethod
    def begin(self, step: Step, request: Request) -> None:
        """Send a request without waiting for the reply, see `answered`."""

    @abstractmethod
    def answered(self) -> Sequence[Reply]:
        """Return the replies to `begin` that arrived since the last call."""

    @abstractmethod
    def require_client(self, clients: Sequence[str], waited_s: float) -> None:
        """Raise `RunError` if none of ``clients`` came within the time to wait."""
