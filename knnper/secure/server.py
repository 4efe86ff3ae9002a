"""The server's half of secure aggregation: one sum, from the keys to the result."""

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.secure.client import add_pair_masks
from knnper.secure.messages import (
    FEWEST_CLIENTS,
    MaskRequest,
    PublicKeys,
    RoundPlan,
    SecureAggregationError,
    Shares,
    UnmaskRequest,
)
from knnper.secure.primitives import (
    combine_shares,
    is_share,
    public_key,
    self_mask,
)
from knnper.secure.quantization import Words


class TooFewClientsError(SecureAggregationError):
    """Too many clients dropped out; nothing of the updates was learned."""


def random_groups(
    numbers: Collection[str], num_neighbors: int, rng: np.random.Generator
) -> dict[str, tuple[str, ...]]:
    """Return each client's group, itself and its neighbours, in a random graph.

    The clients stand in a circle in random order, and each has the nearest as
    neighbours: a Harary graph (Bell et al. 2020, section 3.2).
    """
    count = len(numbers)
    circle = [str(number) for number in rng.permutation(sorted(numbers, key=int))]
    if count - 1 <= num_neighbors:
        return {number: tuple(circle) for number in circle}
    half = max(1, num_neighbors // 2)
    offsets = range(-half, half + 1)
    return {
        number: tuple(circle[(place + offset) % count] for offset in offsets)
        for place, number in enumerate(circle)
    }


def shares_needed(size: int, threshold: float) -> int:
    """Return t for a group of ``size`` clients: more than half in any case."""
    return max(size // 2 + 1, math.ceil(threshold * size))


def require_enough(count: int, least: float, action: str) -> None:
    """Raise TooFewClientsError unless ``least`` clients did ``action``."""
    if count < least:
        raise TooFewClientsError(
            f"{count} clients {action}, expected {math.ceil(least)} or more: no sum is "
            "unmasked, and nothing was learned of any update"
        )


@dataclass
class SecureSum:
    """One sum; the stages in the order of the methods.

    With ``pairwise`` masks only `plans` are needed. With SecAgg+, the next requests
    after each stage are for the clients that replied. A stage raises
    `TooFewClientsError` if the sum can no longer be unmasked, before it asks for
    anything that would reveal a part.

    Attributes
    ----------
    execution, attempt
        See `RoundPlan`.
    weights
        By client, its training examples in the mean.
    settings
        The experiment's ``training.secure_aggregation``.
    rng
        Draws the graph.
    """

    execution: str
    weights: Mapping[str, int]
    settings: SecAggPlusSettings | PairwiseSettings
    server_round: int
    rng: np.random.Generator
    attempt: int = 1
    _keys: dict[str, PublicKeys] = field(default_factory=dict)
    _plans: dict[str, RoundPlan] = field(default_factory=dict)
    _sealed: dict[str, Shares] = field(default_factory=dict)  # by sender
    _sharing: set[str] = field(default_factory=set)  # with masks in the updates
    _survivors: set[str] = field(default_factory=set)
    _revealed: dict[str, Shares] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {str(n): name for n, name in enumerate(sorted(self.weights), 1)}
        self._numbers = {name: number for number, name in self._names.items()}

    def add_keys(self, client: str, keys: PublicKeys) -> None:
        """Stage 0: note a client's reply to `KeysRequest`."""
        self._keys[self._numbers[client]] = keys

    def plans(self) -> dict[str, RoundPlan]:
        """Stage 1: by client, the round with the keys of its neighbours."""
        require_enough(len(self._keys), FEWEST_CLIENTS, "sent keys")
        settings, neighbors, threshold = self.settings, len(self._keys), 0.0
        if isinstance(settings, SecAggPlusSettings):
            neighbors, threshold = settings.neighbors, settings.threshold
        names = json.dumps(sorted(self._numbers)).encode()
        for number, group in random_groups(self._keys, neighbors, self.rng).items():
            self._plans[number] = RoundPlan(
                execution=self.execution,
                server_round=self.server_round,
                number=number,
                weight=self.weights[self._names[number]],
                clients=hashlib.sha256(names).hexdigest(),
                largest_weight=max(self.weights.values()),
                threshold=shares_needed(len(group), threshold) if threshold else 0,
                peers={peer: self._keys[peer] for peer in group},
                attempt=self.attempt,
            )
        return {self._names[number]: plan for number, plan in self._plans.items()}

    def add_shares(self, client: str, shares: Shares) -> None:
        """Note a client's reply of stage 1."""
        number = self._numbers[client]
        expected = self._plans[number].peers.keys() - {number}
        if shares.keys() != expected:
            raise SecureAggregationError(
                f"found shares for {len(shares)} clients, expected one for each of the "
                f"{len(expected)} neighbours"
            )
        self._sealed[number] = shares

    def mask_requests(self) -> dict[str, MaskRequest]:
        """Stage 2: by client, the shares that its neighbours sealed for it.

        A client with too few neighbours left is left out, since its masks could not be
        removed.
        """
        sharing, before = set(self._sealed), 0
        while len(sharing) != before:
            before = len(sharing)
            sharing = {
                number
                for number in sharing
                if len(self._alive(number, sharing)) >= self._plans[number].threshold
            }
        require_enough(len(sharing), FEWEST_CLIENTS, "shared their secrets")
        self._sharing = sharing
        return {
            self._names[number]: MaskRequest(
                self.execution,
                {
                    sender: self._sealed[sender][number]
                    for sender in self._alive(number, sharing)
                    if sender != number
                },
            )
            for number in sharing
        }

    def unmask_requests(self, survivors: Collection[str]) -> dict[str, UnmaskRequest]:
        """Stage 3: by client, the survivors among its peers.

        ``survivors``: the clients with a masked update in the sum.
        """
        require_enough(len(survivors), FEWEST_CLIENTS, "sent updates")
        self._survivors = {self._numbers[client] for client in survivors}
        # If all of a group dropped out, none of its masks is in the sum.
        self._sharing = {
            number for number in self._sharing if self._alive(number, self._survivors)
        }
        self._require_recoverable(self._survivors, "sent updates")
        return {
            self._names[number]: UnmaskRequest(
                self.execution, tuple(self._alive(number, self._survivors))
            )
            for number in self._survivors
        }

    def add_revealed(self, client: str, revealed: Shares) -> None:
        """Note a client's reply of stage 3."""
        number = self._numbers[client]
        owners = set(self._alive(number, self._sharing))
        if revealed.keys() != owners or not all(map(is_share, revealed.values())):
            raise SecureAggregationError("found other shares than were asked for")
        self._revealed[number] = revealed

    def unmasked(self, masked: Words) -> Words:
        """Return the sum of the survivors' encoded updates from that of the masked."""
        self._require_recoverable(self._revealed.keys(), "revealed their shares")
        total = masked.copy()
        for number in self._survivors:
            total -= self_mask(self._recovered(number), len(total))
        # The masks of a dropped client cancel those that its neighbours have added.
        for number in self._sharing - self._survivors:
            secret, plan = self._recovered(number), self._plans[number]
            if public_key(secret) != plan.peers[number].masking:
                raise SecureAggregationError(
                    f"the shares of client {self._names[number]} do not give its key"
                )
            others = self._alive(number, self._survivors)
            add_pair_masks(total, secret, repr(self.settings), plan, others)
        return total

    def _alive(self, number: str, clients: Collection[str]) -> list[str]:
        """Return the members of a client's group that are in ``clients``, sorted."""
        alive = (peer for peer in self._plans[number].peers if peer in clients)
        return sorted(alive, key=int)

    def _require_recoverable(self, repliers: Collection[str], action: str) -> None:
        """Raise unless ``repliers`` hold enough shares of every secret needed."""
        for number in self._sharing:
            num_alive = len(self._alive(number, repliers))
            threshold = self._plans[number].threshold
            require_enough(num_alive, threshold, f"of a client's group {action}")

    def _recovered(self, number: str) -> str:
        """Recover the self-mask secret of a survivor, the masking secret of others."""
        holders = enumerate(sorted(self._plans[number].peers, key=int), 1)
        shares = (
            (place, self._revealed[holder][number])
            for place, holder in holders
            if holder in self._revealed
        )
        return combine_shares(
            dict(itertools.islice(shares, self._plans[number].threshold))
        )
