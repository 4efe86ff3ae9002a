"""The messages of secure aggregation, in the order of the stages.

Clients are known to each other by numbers, not by names. Keys, secrets and ciphertexts
are written in hexadecimal.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from knnper.errors import RunError
from knnper.reasons import Code, SafeReason

FEWEST_CLIENTS = 3
"""With two, each could subtract its own update from the sum."""


class SecureAggregationError(RunError):
    """A request or a reply does not belong to a correct execution of the protocol."""

    reasons = (SafeReason(Code.SECURE_AGGREGATION),)


@dataclass(frozen=True)
class KeysRequest:
    """Stage 0: asks a client for new keys.

    ``execution`` names this execution of the protocol in all its messages.
    """

    execution: str


@dataclass(frozen=True)
class PublicKeys:
    """Reply of stage 0: the public keys for shares and for masks."""

    encryption: str
    masking: str


@dataclass(frozen=True)
class RoundPlan:
    """Stage 1: the round, for one client; asks it for shares of its secrets.

    Attributes
    ----------
    number
        Of this client.
    weight
        Training examples of this client in the mean.
    clients
        Digest of the names of the clients that the round began with. Numbers alone do
        not show that a repeated round has other clients.
    largest_weight
        Of these clients. A client's update is multiplied by ``weight`` and divided by
        this number.
    threshold
        t, the shares that recover a secret, and the fewest clients among ``peers`` that
        the sum must contain. 0 if no secret is shared: all must reply.
    peers
        By number, the keys of the client itself and of its neighbours.
    attempt
        The number of the sum among all with the same keys, from 1.
    """

    execution: str
    server_round: int
    number: str
    weight: int
    clients: str
    largest_weight: int
    threshold: int
    peers: dict[str, PublicKeys]
    attempt: int


Shares: TypeAlias = dict[str, str]
"""Shares of secrets, by a client's number.

In the reply of stage 1, the shares of the client's secrets, encrypted for each peer. In
the reply of stage 3, one share of a secret of each peer.
"""


@dataclass(frozen=True)
class MaskRequest:
    """Stage 2, sent with the model: asks for the masked update.

    Attributes
    ----------
    execution
        As in `KeysRequest`.
    sealed
        By number, the shares that the neighbours sealed for this client. An update is
        masked against these neighbours.
    plan
        The round, where no shares were exchanged before.
    """

    execution: str
    sealed: Shares = field(default_factory=dict)
    plan: RoundPlan | None = None


@dataclass(frozen=True)
class UnmaskRequest:
    """Stage 3: asks for the shares that unmask the sum.

    ``survivors`` are the peers, itself included, with a masked update in the sum. A
    client reveals a share of their self-mask secrets, and of the masking secrets of all
    others that exchanged shares with it.
    """

    execution: str
    survivors: tuple[str, ...]


@dataclass(frozen=True)
class SecureRequest:
    """The message of a stage without the model."""

    message: KeysRequest | RoundPlan | UnmaskRequest


@dataclass(frozen=True)
class SecureReply:
    """The reply to a `SecureRequest`: keys at stage 0, then shares."""

    message: PublicKeys | Shares
