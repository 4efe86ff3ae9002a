"""The server's half of SecAgg+: one execution, from the keys to the sum."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from knnper.secure.client import pair_purpose
from knnper.secure.messages import (
    FEWEST_CLIENTS,
    MaskRequest,
    PublicKeys,
    RevealedShares,
    RoundPlan,
    SealedShares,
    SecureAggregationError,
    UnmaskRequest,
)
from knnper.secure.primitives import (
    SECRET_BYTES,
    combine_shares,
    expanded_mask,
    from_hex,
    pair_key,
    public_key,
    self_mask,
)
from knnper.secure.quantization import Words


class TooFewClientsError(SecureAggregationError):
    """Too many clients dropped out; nothing of the updates was learned."""


@dataclass(frozen=True)
class Graph:
    """How many neighbours a client shares its secrets with.

    Attributes
    ----------
    neighbors
        k, at most; all others where there are no more.
    threshold
        The fraction of a group (a client and its neighbours) with enough shares to
        recover the client's secrets; in any case more than half of the group.
    """

    neighbors: int
    threshold: float

    def groups(
        self, numbers: Collection[str], rng: np.random.Generator
    ) -> dict[str, tuple[str, ...]]:
        """Return each client's group, itself and its neighbours, in a random graph.

        The clients stand in a circle in random order, and each has the k nearest as
        neighbours: a Harary graph (Bell et al. 2020, section 3.2).
        """
        count = len(numbers)
        circle = [str(number) for number in rng.permutation(sorted(numbers, key=int))]
        if count - 1 <= self.neighbors:
            return {number: tuple(circle) for number in circle}
        half = max(1, self.neighbors // 2)
        offsets = range(-half, half + 1)
        return {
            number: tuple(circle[(place + offset) % count] for offset in offsets)
            for place, number in enumerate(circle)
        }

    def shares_needed(self, size: int) -> int:
        """Return t for a group of ``size`` clients."""
        return max(size // 2 + 1, math.ceil(self.threshold * size))


class SecureSum:
    """One execution of SecAgg+; the stages in the order of the methods.

    After each stage the next requests are for the clients that replied. A stage raises
    `TooFewClientsError` if the sum can no longer be unmasked, before it asks for
    anything that would reveal a part.

    Parameters
    ----------
    weights
        By client, its training examples in the mean.
    execution
        Name of this execution.
    settings
        As in `ClientSecrets.settings`.
    rng
        Draws the graph.
    """

    def __init__(
        self,
        weights: Mapping[str, int],
        graph: Graph,
        server_round: int,
        execution: str,
        settings: str,
        rng: np.random.Generator,
    ) -> None:
        self.execution = execution
        self.weights = weights
        self._graph, self._settings, self._rng = graph, settings, rng
        self._server_round = server_round
        names = sorted(weights)
        self._numbers = {name: str(place) for place, name in enumerate(names, 1)}
        self._names = {number: name for name, number in self._numbers.items()}
        self._keys: dict[str, PublicKeys] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._sealed: dict[str, dict[str, str]] = {}  # by sender, then receiver
        self._sharing: set[str] = set()  # clients with masks in the masked updates
        self._survivors: set[str] = set()
        self._total: Words | None = None
        self._revealed: dict[str, RevealedShares] = {}

    def add_keys(self, client: str, keys: PublicKeys) -> None:
        """Stage 0: note a client's reply to `KeysRequest`."""
        self._keys[self._numbers[client]] = keys

    def plans(self) -> dict[str, RoundPlan]:
        """Stage 1: by client, the round with the keys of its neighbours."""
        _require_enough(len(self._keys), FEWEST_CLIENTS, "sent keys")
        self._groups = self._graph.groups(self._keys.keys(), self._rng)
        return {self._names[number]: self._plan(number) for number in self._groups}

    def add_shares(self, client: str, shares: SealedShares) -> None:
        """Note a client's reply of stage 1."""
        number = self._numbers[client]
        expected = set(self._groups[number]) - {number}
        if shares.by_receiver.keys() != expected:
            raise SecureAggregationError(
                f"found shares for {len(shares.by_receiver)} clients, expected one for "
                f"each of the {len(expected)} neighbours"
            )
        self._sealed[number] = shares.by_receiver

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
                if len(self._alive(number, sharing)) >= self._threshold(number)
            }
        _require_enough(len(sharing), FEWEST_CLIENTS, "shared their secrets")
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

    def add_masked(self, client: str, masked: Words) -> None:
        """Add a client's masked update, shape (d,), to the sum; d must be the same."""
        if self._total is None:
            self._total = masked.copy()
        else:
            np.add(self._total, masked, out=self._total)
        self._survivors.add(self._numbers[client])

    def unmask_requests(self) -> dict[str, UnmaskRequest]:
        """Stage 3: by client, the survivors and the dropped among its peers."""
        _require_enough(len(self._survivors), FEWEST_CLIENTS, "sent updates")
        self._require_recoverable(self._survivors, "sent updates")
        requests = {}
        for number in self._survivors:
            peers = self._alive(number, self._sharing)
            requests[self._names[number]] = UnmaskRequest(
                self.execution,
                tuple(peer for peer in peers if peer in self._survivors),
                tuple(peer for peer in peers if peer not in self._survivors),
            )
        return requests

    def add_revealed(self, client: str, revealed: RevealedShares) -> None:
        """Note a client's reply of stage 3."""
        number = self._numbers[client]
        peers = self._alive(number, self._sharing)
        for shares, owners in (
            (revealed.self_masks, self._survivors.intersection(peers)),
            (revealed.masking_keys, set(peers) - self._survivors),
        ):
            lengths = {len(from_hex(share)) for share in shares.values()}
            if shares.keys() != owners or lengths - {SECRET_BYTES}:
                raise SecureAggregationError("found other shares than were asked for")
        self._revealed[number] = revealed

    def total(self) -> Words:
        """Return the sum of the encoded updates of the survivors, shape (d,)."""
        if self._total is None:
            raise TooFewClientsError("no client sent an update")
        self._require_recoverable(self._revealed.keys(), "revealed their shares")
        total = self._total.copy()
        for number in self._survivors:
            secret = self._recovered(number, of_masks=True)
            np.subtract(total, self_mask(secret, len(total)), out=total)
        for number in self._sharing - self._survivors:
            for stream, is_left_over in self._pair_masks(number, len(total)):
                operation = np.subtract if is_left_over else np.add
                operation(total, stream, out=total)
        return total

    def _plan(self, number: str) -> RoundPlan:
        return RoundPlan(
            execution=self.execution,
            server_round=self._server_round,
            number=number,
            weight=self.weights[self._names[number]],
            clients=_digest(self.weights),
            largest_weight=max(self.weights.values()),
            threshold=self._threshold(number),
            peers={peer: self._keys[peer] for peer in self._groups[number]},
        )

    def _threshold(self, number: str) -> int:
        return self._graph.shares_needed(len(self._groups[number]))

    def _alive(self, number: str, clients: Collection[str]) -> list[str]:
        """Return the members of a client's group that are in ``clients``, sorted."""
        alive = (peer for peer in self._groups[number] if peer in clients)
        return sorted(alive, key=int)

    def _require_recoverable(self, repliers: Collection[str], action: str) -> None:
        """Raise unless ``repliers`` hold enough shares of every secret needed."""
        for number in self._sharing:
            num_alive = len(self._alive(number, repliers))
            needed = number in self._survivors or self._alive(number, self._survivors)
            if needed:
                action_of_group = f"of a client's group {action}"
                _require_enough(num_alive, self._threshold(number), action_of_group)

    def _recovered(self, number: str, *, of_masks: bool) -> bytes:
        """Recover a client's self-mask secret or masking secret from its shares."""
        holders = sorted(self._groups[number], key=int)
        shares: dict[int, bytes] = {}
        for place, holder in enumerate(holders, 1):
            revealed = self._revealed.get(holder)
            if revealed is not None and len(shares) < self._threshold(number):
                by_owner = revealed.self_masks if of_masks else revealed.masking_keys
                shares[place] = from_hex(by_owner[number])
        return combine_shares(shares)

    def _pair_masks(self, number: str, size: int) -> Iterator[tuple[Words, bool]]:
        """Yield the masks that a dropped client's neighbours have added or subtracted.

        The second value is true for those that were added.
        """
        secret = self._recovered(number, of_masks=False)
        if public_key(secret).hex() != self._keys[number].masking:
            raise SecureAggregationError(
                f"the shares of client {self._names[number]} do not give its key"
            )
        plan = self._plan(number)
        for peer in self._alive(number, self._survivors):
            other = from_hex(self._keys[peer].masking)
            key = pair_key(secret, other, pair_purpose(self._settings, plan, peer))
            yield expanded_mask(key, size), int(peer) < int(number)


def pairwise_plans(
    keys: Mapping[str, PublicKeys],
    weights: Mapping[str, int],
    server_round: int,
    execution: str,
    attempt: int,
) -> dict[str, RoundPlan]:
    """Return the round of each client for `mask_pairwise`: all are neighbours.

    ``keys``: of the clients in the sum. ``weights``: of all clients that the round
    began with. ``execution``: that of the keys.
    """
    numbers = {name: str(place) for place, name in enumerate(sorted(keys), 1)}
    peers = {numbers[name]: keys[name] for name in numbers}
    return {
        name: RoundPlan(
            execution=execution,
            server_round=server_round,
            number=number,
            weight=weights[name],
            clients=_digest(keys),
            largest_weight=max(weights.values()),
            threshold=0,
            peers=peers,
            attempt=attempt,
        )
        for name, number in numbers.items()
    }


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()


def _require_enough(count: int, least: int, action: str) -> None:
    if count < least:
        raise TooFewClientsError(
            f"{count} clients {action}, expected {least} or more: no sum is unmasked, "
            "and nothing was learned of any update"
        )
