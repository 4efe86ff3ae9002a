"""How the server reaches its clients, whatever carries the messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from knnper.transport.messages import Purpose


@dataclass(frozen=True)
class Request:
    """Something one client is asked to do.

    Attributes
    ----------
    client
        The client's name.
    payload
        What the method broadcasts to it.
    reference
        What the method broadcasts to nobody in particular; for `Purpose.PERSONALIZE`.
    """

    client: str
    payload: object
    reference: object | None = None


@dataclass(frozen=True)
class Reply:
    """What came of a request.

    Attributes
    ----------
    client
        The client's name.
    record
        What it answered; None if it failed.
    failure
        Why it failed; None if it did not.
    """

    client: str
    record: Any
    failure: str | None = None


class Federation(Protocol):
    """The clients as the server sees them."""

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_round: int,
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
        keep_round
            The oldest round to which the server may still go back.
        requests
            One per client.
        """
