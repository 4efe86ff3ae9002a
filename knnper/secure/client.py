"""The client's half of secure aggregation: secrets and a request in, a reply out.

A client refuses requests that a correct server never makes:

- with invalid keys, with one key for two clients, or without this client's own keys;
- with fewer neighbours, sealed shares or survivors than the threshold;
- for both kinds of share of one client, which together would unmask its update. As the
  threshold is more than half of the holders of a secret, the server cannot get enough
  shares of both kinds from different honest clients either;
- of another execution, or of a stage for the second time.

The values on which clients must agree (round, largest weight, keys, settings) are part
of the text from which the keys of pairs are derived. If two neighbours receive
different values, their masks do not cancel, and the sum stays random.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from knnper.secure.messages import (
    FEWEST_CLIENTS,
    KeysRequest,
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
    expanded_mask,
    from_hex,
    new_secret,
    open_sealed,
    pair_key,
    public_key,
    seal,
    self_mask,
    split_secret,
)
from knnper.secure.quantization import Words

Stage = Literal["keys", "shares", "masked"]


@dataclass(frozen=True)
class ClientSecrets:
    """A client's state between the stages of one execution; it never leaves.

    Attributes
    ----------
    stage
        The last stage that the client has replied to.
    encryption, masking, self_mask
        Its secrets.
    settings
        The experiment's settings as text, the same for all clients.
    last_attempt
        The last attempt of a ``pairwise`` execution that the client has masked.
    plan
        The round, from the stage ``shares`` on.
    held
        By number of the secrets' owner, itself included, the shares that it holds: of
        the self-mask secret, followed by that of the masking secret.
    """

    execution: str
    settings: str
    encryption: str
    masking: str
    self_mask: str
    stage: Stage = "keys"
    last_attempt: int = 0
    plan: RoundPlan | None = None
    held: dict[str, str] | None = None

    @property
    def public_keys(self) -> PublicKeys:
        """The public keys of ``encryption`` and ``masking``."""
        secrets = (self.encryption, self.masking)
        return PublicKeys(*(public_key(bytes.fromhex(key)).hex() for key in secrets))


def make_keys(request: KeysRequest, settings: str) -> tuple[ClientSecrets, PublicKeys]:
    """Stage 0: make new secrets; return them and their public keys."""
    secrets = ClientSecrets(
        execution=request.execution,
        settings=settings,
        encryption=new_secret().hex(),
        masking=new_secret().hex(),
        self_mask=new_secret().hex(),
    )
    return secrets, secrets.public_keys


def share_secrets(
    secrets: ClientSecrets, plan: RoundPlan
) -> tuple[ClientSecrets, SealedShares]:
    """Stage 1: share the secrets of both masks with the neighbours."""
    _require_stage(secrets, plan.execution, "keys")
    _require_plan(secrets, plan)
    if not len(plan.peers) >= plan.threshold > len(plan.peers) / 2:
        raise SecureAggregationError(
            f"found a threshold of {plan.threshold} of {len(plan.peers)} clients, "
            "expected more than half of them"
        )
    holders = sorted(plan.peers, key=int)
    mask_shares, key_shares = (
        split_secret(bytes.fromhex(secret), plan.threshold, holders)
        for secret in (secrets.self_mask, secrets.masking)
    )
    by_receiver = {
        number: seal(
            _key_for_shares(secrets, plan, number),
            mask_shares[number] + key_shares[number],
            _direction(plan.number, number),
        ).hex()
        for number in holders
        if number != plan.number
    }
    held = {plan.number: (mask_shares[plan.number] + key_shares[plan.number]).hex()}
    secrets = replace(secrets, stage="shares", plan=plan, held=held)
    return secrets, SealedShares(by_receiver)


def mask(
    secrets: ClientSecrets, request: MaskRequest, values: Words
) -> tuple[ClientSecrets, Words]:
    """Stage 2: mask the encoded update ``values``, shape (d,), against the neighbours.

    y = x + PRG(b) + Σ_{j > i} PRG(s_ij) - Σ_{j < i} PRG(s_ij), modulo 2^32, over the
    neighbours j that have shared their secrets (Bell et al. 2020, Algorithm 2).
    """
    _require_stage(secrets, request.execution, "shares")
    plan, held = _plan_and_shares(secrets)
    neighbors = plan.peers.keys() - {plan.number}
    if not request.sealed.keys() <= neighbors:
        raise SecureAggregationError("found shares of clients that are no neighbours")
    if 1 + len(request.sealed) < plan.threshold:
        raise SecureAggregationError(
            f"found the shares of {1 + len(request.sealed)} clients, expected "
            f"{plan.threshold} or more"
        )
    received = {
        number: _opened(secrets, plan, number, sealed)
        for number, sealed in request.sealed.items()
    }
    masked = values + self_mask(bytes.fromhex(secrets.self_mask), len(values))
    _add_pair_masks(masked, secrets, plan, request.sealed)
    return replace(secrets, stage="masked", held={**held, **received}), masked


def mask_pairwise(
    secrets: ClientSecrets, plan: RoundPlan, values: Words
) -> tuple[ClientSecrets, Words]:
    """Mask an encoded update with pairwise masks alone; all clients must do so."""
    _require_stage(secrets, plan.execution, "keys")
    if plan.attempt <= secrets.last_attempt:  # no mask may be used twice
        raise SecureAggregationError(
            f"found attempt {plan.attempt}, expected a number above "
            f"{secrets.last_attempt}"
        )
    _require_plan(secrets, plan)
    masked = values.copy()
    _add_pair_masks(masked, secrets, plan, plan.peers.keys() - {plan.number})
    return replace(secrets, last_attempt=plan.attempt), masked


def unmask(secrets: ClientSecrets, request: UnmaskRequest) -> RevealedShares:
    """Stage 3: reveal one share of each client: of its self-mask or its masking secret.

    The caller erases ``secrets`` before the reply leaves.
    """
    _require_stage(secrets, request.execution, "masked")
    plan, held = _plan_and_shares(secrets)
    survivors, dropped = set(request.survivors), set(request.dropped)
    if survivors & dropped:
        raise SecureAggregationError(
            "found a client both among the survivors and the dropped: its two shares "
            "together would unmask its update"
        )
    if plan.number not in survivors or (survivors | dropped) != held.keys():
        raise SecureAggregationError(
            "expected as survivors or dropped this client and all others that gave it "
            "shares, found a different set"
        )
    if len(survivors) < plan.threshold:
        raise SecureAggregationError(
            f"found {len(survivors)} survivors, expected {plan.threshold} or more"
        )
    length = 2 * SECRET_BYTES  # of a share in hexadecimal
    return RevealedShares(
        {number: held[number][:length] for number in sorted(survivors)},
        {number: held[number][length:] for number in sorted(dropped)},
    )


def relative_weight(plan: RoundPlan, num_examples: int) -> float:
    """Return the factor on the update of a client with ``num_examples``."""
    if not 1 <= plan.weight <= min(num_examples, plan.largest_weight):
        raise SecureAggregationError(
            f"found a weight of {plan.weight}, at most {plan.largest_weight}, for a "
            f"client of {num_examples} examples"
        )
    return plan.weight / plan.largest_weight


def clients_of_sum(secrets: ClientSecrets, request: UnmaskRequest) -> tuple[int, str]:
    """Return the round of a sum, and a fingerprint of the clients in it.

    With them a client notices that a round is summed again over other clients: the
    difference of the two sums would be an update. It knows its neighbours only; the
    other clients check theirs.
    """
    plan, _ = _plan_and_shares(secrets)
    clients = [plan.number, plan.clients, sorted(request.survivors)]
    return plan.server_round, hashlib.sha256(json.dumps(clients).encode()).hexdigest()


def _require_stage(secrets: ClientSecrets, execution: str, stage: Stage) -> None:
    if (secrets.execution, secrets.stage) != (execution, stage):
        raise SecureAggregationError(
            f"found a request after the stage {stage!r} of execution {execution[:40]!r}"
            f", expected a request after {secrets.stage!r} of {secrets.execution!r}"
        )


def _require_plan(secrets: ClientSecrets, plan: RoundPlan) -> None:
    """Reject a plan that a correct server would not make."""
    if not all(number.isdecimal() for number in plan.peers):
        raise SecureAggregationError("found clients without a number")
    if plan.peers.get(plan.number) != secrets.public_keys:
        raise SecureAggregationError("expected this client's own keys, found others")
    peers = plan.peers.values()
    all_keys = {key for peer in peers for key in (peer.encryption, peer.masking)}
    if len(all_keys) < 2 * len(peers):
        raise SecureAggregationError("found a key twice, expected keys that differ")
    if len(plan.peers) < FEWEST_CLIENTS:
        raise SecureAggregationError(
            f"found {len(plan.peers)} clients, expected {FEWEST_CLIENTS} or more"
        )


def _plan_and_shares(secrets: ClientSecrets) -> tuple[RoundPlan, dict[str, str]]:
    if secrets.plan is None or secrets.held is None:
        raise SecureAggregationError("expected a round that has begun")
    return secrets.plan, secrets.held


def _opened(secrets: ClientSecrets, plan: RoundPlan, sender: str, sealed: str) -> str:
    key = _key_for_shares(secrets, plan, sender)
    shares = open_sealed(key, from_hex(sealed), _direction(sender, plan.number))
    if len(shares) != 2 * SECRET_BYTES:
        raise SecureAggregationError(f"found shares of {len(shares)} bytes")
    return shares.hex()


def _add_pair_masks(
    masked: Words, secrets: ClientSecrets, plan: RoundPlan, others: Iterable[str]
) -> None:
    secret = bytes.fromhex(secrets.masking)
    for number in others:
        other = from_hex(plan.peers[number].masking)
        key = pair_key(secret, other, pair_purpose(secrets.settings, plan, number))
        stream = expanded_mask(key, len(masked))
        if int(plan.number) < int(number):
            np.add(masked, stream, out=masked)
        else:
            np.subtract(masked, stream, out=masked)


def _key_for_shares(secrets: ClientSecrets, plan: RoundPlan, number: str) -> bytes:
    other = from_hex(plan.peers[number].encryption)
    purpose = b"shares, " + pair_purpose(secrets.settings, plan, number)
    return pair_key(bytes.fromhex(secrets.encryption), other, purpose)


def pair_purpose(settings: str, plan: RoundPlan, number: str) -> bytes:
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
