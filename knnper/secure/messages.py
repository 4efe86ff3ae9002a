"""The messages of secure aggregation, in the order of the stages.

Clients are known to each other by numbers, not by names. Keys, secrets and ciphertexts
are written in hexadecimal.
"""

from dataclasses import dataclass, field

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
    """A round, as it is sent to one client.

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
        With ``pairwise``, the number of the sum among all with the same keys, from 1.
    """

    execution: str
    server_round: int
    number: str
    weight: int
    clients: str
    largest_weight: int
    threshold: int
    peers: dict[str, PublicKeys]
    attempt: int = 0


@dataclass(frozen=True)
class SealedShares:
    """Reply of stage 1: shares of the client's secrets, encrypted for each peer."""

    by_receiver: dict[str, str]


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
    sealed: dict[str, str] = field(default_factory=dict)
    plan: RoundPlan | None = None


@dataclass(frozen=True)
class UnmaskRequest:
    """Stage 3: asks for the shares that unmask the sum.

    Attributes
    ----------
    survivors
        Peers, itself included, with a masked update in the sum.
    dropped
        Neighbours that exchanged shares and did not send their update.
    """

    execution: str
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class RevealedShares:
    """Reply of stage 3: the client's shares, by the number of the secret's owner.

    Attributes
    ----------
    self_masks
        Of the survivors' self-mask secrets.
    masking_keys
        Of the masking secrets of the dropped.
    """

    self_masks: dict[str, str]
    masking_keys: dict[str, str]


@dataclass(frozen=True)
class SecureRequest:
    """The message of a stage without the model."""

    message: KeysRequest | RoundPlan | UnmaskRequest


@dataclass(frozen=True)
class SecureReply:
    """The reply to a `SecureRequest`, in the same order of types."""

    message: PublicKeys | SealedShares | RevealedShares
