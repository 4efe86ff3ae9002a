"""How the server reaches its clients, whatever carries the messages."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from knnper.transport.messages import Purpose


@dataclass(frozen=True)
class Request:
    """Something that clients are asked to do.

    Attributes
    ----------
    clients
        Their names. More than one only where they are sent the same: they are served
        together, in one task.
    payload
        What the method broadcasts to them.
    reference
        What the method broadcasts to nobody in particular; for `Purpose.PERSONALIZE`.
    seen
        Whether they may have taken part in training.
    state_rounds
        See `knnper.transport.messages.Job`.
    """

    clients: tuple[str, ...]
    payload: object
    reference: object | None = None
    seen: bool = True
    state_rounds: tuple[int, ...] = ()

    @property
    def client(self) -> str:
        """The name of the only client."""
        (name,) = self.clients
        return name


@dataclass(frozen=True)
class Reply:
    """What came of a request.

    Attributes
    ----------
    clients
        Of the request.
    record
        What they answered; None if one of them failed.
    failure
        Why it failed; None if none did.
    """

    clients: tuple[str, ...]
    record: Any
    failure: str | None = None

    @property
    def client(self) -> str:
        """The name of the only client."""
        (name,) = self.clients
        return name


class Federation(ABC):
    """The clients as the server sees them.

    Attributes
    ----------
    round_attempts
        Times that a round in which too many clients fail is made. Once, where they
        would fail again.
    may_be_away
        Whether a client that does not personalise is left out, and gets the model when
        it is back. Else the run ends, since something is wrong with it.
    """

    round_attempts: int = 1
    may_be_away: bool = False

    def await_clients(self, clients: Sequence[str], least: int) -> None:  # noqa: B027
        """Wait until at least ``least`` of ``clients`` can be reached.

        Raises
        ------
        RunError
            If they cannot, for longer than the federation waits.
        """

    @abstractmethod
    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_rounds: Sequence[int],
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """Ask clients and yield their replies in the order of the requests.

        Replies are a stream: each is dropped before the next one is looked at.

        Parameters
        ----------
        purpose
            What is asked.
        server_round
            From 1; the rounds made so far for what is not training.
        keep_rounds
            Those to which the server may still go back.
        requests
            Taken one after the other, when there is room for one more.
        """
