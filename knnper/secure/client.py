"""The client's half of secure aggregation: state and request in, state and reply out.

A client refuses requests that a correct server never makes:

- with invalid keys, with one key for two clients, or without this client's own keys;
- with fewer neighbours, sealed shares or survivors than the threshold;
- of another execution, or of a stage for the second time;
- to unmask a round again over other clients.

Of each client it reveals only one kind of share: both together would unmask an update.
As the threshold is more than half of the holders of a secret, the server cannot get
enough shares of both kinds from different honest clients either.

The values on which clients must agree (round, largest weight, keys, settings) are part
of the text from which the keys of pairs are derived. If two neighbours receive
different values, their masks do not cancel, and the sum stays random.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from knnper.secure.messages import (
    FEWEST_CLIENTS,
    KeysRequest,
    MaskRequest,
    PublicKeys,
    RoundPlan,
    SecureAggregationError,
    Shares,
    UnmaskRequest,
)
from knnper.secure.primitives import (
    SHARE_DIGITS,
    expanded_mask,
    new_secret,
    open_sealed,
    pair_key,
    public_key,
    seal,
    self_mask,
    split_secret,
)
from knnper.secure.quantization import Words

Stage = Literal["none", "keys", "shares", "masked"]


@dataclass(frozen=True)
class ClientState:
    """A client's state between the stages of one execution; it never leaves.

    Attributes
    ----------
    sums
        By round, a fingerprint of the clients in the sum that it has helped to unmask.
        All other attributes belong to the execution in progress.
    stage
        The last stage that the client has replied to.
    settings
        The experiment's settings as text, the same for all clients.
    encryption, masking, self_mask
        Its secrets.
    last_attempt
        The last attempt of a ``pairwise`` execution that the client has masked.
    plan
        The round, from the stage ``shares`` on.
    held
        By number of the secrets' owner, itself included, the shares that it holds: of
        the self-mask secret, followed by that of the masking secret.
    """

    sums: dict[str, str] = field(default_factory=dict)
    execution: str = ""
    stage: Stage = "none"
    settings: str = ""
    encryption: str = ""
    masking: str = ""
    self_mask: str = ""
    last_attempt: int = 0
    plan: RoundPlan | None = None
    held: Shares = field(default_factory=dict)

    @property
    def public_keys(self) -> PublicKeys:
        """The public keys of ``encryption`` and ``masking``."""
        return PublicKeys(public_key(self.encryption), public_key(self.masking))


def make_keys(
    state: ClientState, request: KeysRequest, settings: str
) -> tuple[ClientState, PublicKeys]:
    """Stage 0: make new secrets; return their public keys."""
    state = ClientState(
        sums=state.sums,
        execution=request.execution,
        stage="keys",
        settings=settings,
        encryption=new_secret(),
        masking=new_secret(),
        self_mask=new_secret(),
    )
    return state, state.public_keys


def share_secrets(state: ClientState, plan: RoundPlan) -> tuple[ClientState, Shares]:
    """Stage 1: share the secrets of both masks with the neighbours."""
    _require_plan(state, plan)
    if not len(plan.peers) >= plan.threshold > len(plan.peers) / 2:
        raise SecureAggregationError(
            f"found a threshold of {plan.threshold} of {len(plan.peers)} clients, "
            "expected more than half of them"
        )
    holders = sorted(plan.peers, key=int)
    mask_shares, key_shares = (
        split_secret(secret, plan.threshold, holders)
        for secret in (state.self_mask, state.masking)
    )
    shares = {number: mask_shares[number] + key_shares[number] for number in holders}
    held = {plan.number: shares.pop(plan.number)}
    sealed = {
        number: seal(
            _key_for_shares(state, plan, number),
            share,
            _direction(plan.number, number),
        )
        for number, share in shares.items()
    }
    return replace(state, stage="shares", plan=plan, held=held), sealed


def mask(
    state: ClientState, request: MaskRequest, values: Words
) -> tuple[ClientState, Words]:
    """Stage 2: mask the encoded update ``values``, shape (d,), against the neighbours.

    y = x + PRG(b) + Σ_{j > i} PRG(s_ij) - Σ_{j < i} PRG(s_ij), modulo 2^32, over the
    neighbours j that have shared their secrets (Bell et al. 2020, Algorithm 2).
    """
    _require_stage(state, request.execution, "shares")
    plan = state.plan
    assert plan is not None, "it comes with the stage"
    if not request.sealed.keys() <= plan.peers.keys() - {plan.number}:
        raise SecureAggregationError("found shares of clients that are no neighbours")
    if 1 + len(request.sealed) < plan.threshold:
        raise SecureAggregationError(
            f"found the shares of {1 + len(request.sealed)} clients, expected "
            f"{plan.threshold} or more"
        )
    received = {
        number: open_sealed(
            _key_for_shares(state, plan, number),
            sealed,
            _direction(number, plan.number),
        )
        for number, sealed in request.sealed.items()
    }
    masked = values + self_mask(state.self_mask, len(values))
    add_pair_masks(masked, state.masking, state.settings, plan, request.sealed)
    return replace(state, stage="masked", held={**state.held, **received}), masked


def mask_pairwise(
    state: ClientState, plan: RoundPlan, values: Words
) -> tuple[ClientState, Words]:
    """Mask an encoded update with pairwise masks alone; all clients must do so."""
    _require_plan(state, plan)
    masked = values.copy()
    others = plan.peers.keys() - {plan.number}
    add_pair_masks(masked, state.masking, state.settings, plan, others)
    return replace(state, last_attempt=plan.attempt), masked


def unmask(state: ClientState, request: UnmaskRequest) -> tuple[ClientState, Shares]:
    """Stage 3: reveal one share of each client: of its self-mask or its masking secret.

    The secrets are erased. A round that is summed again over other clients is refused,
    as the difference of the two sums would be an update. A client knows its neighbours
    only; the other clients check theirs.
    """
    _require_stage(state, request.execution, "masked")
    plan = state.plan
    assert plan is not None, "it comes with the stage"
    survivors = set(request.survivors)
    if not {plan.number} <= survivors <= state.held.keys():
        raise SecureAggregationError(
            "expected as survivors this client and others that gave it shares, found "
            "a different set"
        )
    if len(survivors) < plan.threshold:
        raise SecureAggregationError(
            f"found {len(survivors)} survivors, expected {plan.threshold} or more"
        )
    clients = [plan.number, plan.clients, sorted(survivors)]
    digest = hashlib.sha256(json.dumps(clients).encode()).hexdigest()
    server_round = str(plan.server_round)
    if state.sums.get(server_round, digest) != digest:
        raise SecureAggregationError(
            f"round {server_round} was summed before over other clients: the "
            "difference of both sums would show single updates. Resume the run when "
            "the same clients are online, or begin a new one"
        )
    revealed = {
        number: share[:SHARE_DIGITS] if number in survivors else share[SHARE_DIGITS:]
        for number, share in state.held.items()
    }
    return ClientState({**state.sums, server_round: digest}), revealed


def relative_weight(plan: RoundPlan, num_examples: int) -> float:
    """Return the factor on the update of a client with ``num_examples``."""
    if not 1 <= plan.weight <= min(num_examples, plan.largest_weight):
        raise SecureAggregationError(
            f"found a weight of {plan.weight}, at most {plan.largest_weight}, for a "
            f"client of {num_examples} examples"
        )
    return plan.weight / plan.largest_weight


def add_pair_masks(
    masked: Words, secret: str, settings: str, plan: RoundPlan, others: Iterable[str]
) -> None:
    """Add the masks of a client and each of ``others``, in place.

    Those that the other adds for this client are the same with the opposite sign.

    Parameters
    ----------
    masked
        Shape (d,).
    secret, settings, plan
        Of the client: its masking secret, see `ClientState`, and its round.
    """
    for number in others:
        purpose = _pair_purpose(settings, plan, number)
        key = pair_key(secret, plan.peers[number].masking, purpose)
        stream = expanded_mask(key, len(masked))
        operation = np.add if int(plan.number) < int(number) else np.subtract
        operation(masked, stream, out=masked)


def _require_stage(state: ClientState, execution: str, stage: Stage) -> None:
    if (state.execution, state.stage) != (execution, stage):
        raise SecureAggregationError(
            f"found a request after the stage {stage!r} of execution {execution[:40]!r}"
            f", expected a request after {state.stage!r} of {state.execution!r}"
        )


def _require_plan(state: ClientState, plan: RoundPlan) -> None:
    """Reject a plan that a correct server would not make."""
    _require_stage(state, plan.execution, "keys")
    if not all(number.isdecimal() for number in plan.peers):
        raise SecureAggregationError("found clients without a number")
    if plan.peers.get(plan.number) != state.public_keys:
        raise SecureAggregationError("expected this client's own keys, found others")
    peers = plan.peers.values()
    all_keys = {key for peer in peers for key in (peer.encryption, peer.masking)}
    if len(all_keys) < 2 * len(peers):
        raise SecureAggregationError("found a key twice, expected keys that differ")
    if len(plan.peers) < FEWEST_CLIENTS:
        raise SecureAggregationError(
            f"found {len(plan.peers)} clients, expected {FEWEST_CLIENTS} or more"
        )
    if plan.attempt <= state.last_attempt:  # no mask may be used twice
        raise SecureAggregationError(
            f"found attempt {plan.attempt}, expected a number above "
            f"{state.last_attempt}"
        )


def _key_for_shares(state: ClientState, plan: RoundPlan, number: str) -> bytes:
    purpose = b"shares, " + _pair_purpose(state.settings, plan, number)
    return pair_key(state.encryption, plan.peers[number].encryption, purpose)


def _pair_purpose(settings: str, plan: RoundPlan, number: str) -> bytes:
    """Return a digest of the values on which two clients must agree for a key."""

    def described(number: str) -> list[str]:
        return [number, plan.peers[number].encryption, plan.peers[number].masking]

    known = [
        settings,
        plan.execution,
        plan.attempt,
        plan.server_round,
        plan.clients,
        plan.largest_weight,
        plan.threshold,
        *(described(number) for number in sorted((plan.number, number), key=int)),
    ]
    return hashlib.sha256(json.dumps(known).encode()).digest()


def _direction(sender: str, receiver: str) -> bytes:
    return f"from {sender} to {receiver}".encode()
