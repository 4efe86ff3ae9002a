"""A client's part in secure aggregation: its secrets and the sums it has unmasked.

Each message may be handled by another process, so the secrets are written to a private
folder between the stages of a round. They are erased before the last reply leaves.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from knnper.files import make_private, read_plain, write_atomically
from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.reasons import Code, SafeReason
from knnper.secure import client as protocol
from knnper.secure.client import ClientState
from knnper.secure.messages import (
    KeysRequest,
    MaskRequest,
    PublicKeys,
    RoundPlan,
    SecureAggregationError,
    SecureReply,
    SecureRequest,
    Shares,
)
from knnper.secure.quantization import Quantizer
from knnper.seeding import RandomKey

SECURE = "secure"
"""In the folder of the clients' states."""
_MOST_CLIPPED = 0.01  # of the numbers of an update
_STATE = TypeAdapter(ClientState)

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class SecureSums:
    """The part that the clients of a process have in the secure sums of a run.

    Attributes
    ----------
    settings
        The experiment's ``training.secure_aggregation``; None without secure sums.
    states
        The folder of the clients' states; each gets a file in a private folder there.
    """

    settings: SecAggPlusSettings | PairwiseSettings | None
    states: Path

    def answer(self, clients: Sequence[str], request: SecureRequest) -> SecureReply:
        """Return the reply of a stage without the model."""
        if self.settings is None or len(clients) != 1:
            raise SecureAggregationError(
                "found a request of secure aggregation, which this experiment has not"
            )
        (client,) = clients
        state, message = self._read(client), request.message
        reply: PublicKeys | Shares
        if isinstance(message, KeysRequest):
            state, reply = protocol.make_keys(state, message, repr(self.settings))
        elif isinstance(message, RoundPlan):
            state, reply = protocol.share_secrets(state, message)
        else:
            state, reply = protocol.unmask(state, message)
        self._write(client, state)
        return SecureReply(reply)

    def masked(
        self,
        client: str,
        request: MaskRequest | None,
        values: Tensor,
        num_examples: int,
        server_round: int,
        rng: RandomKey,
    ) -> Tensor:
        """Return an update's differences, float32 (d,), encoded and masked.

        The result is float32 (d,) of any bits. ``rng``: for unbiased rounding.
        """
        settings = self.settings
        if request is None or settings is None:
            raise SecureAggregationError("found no request to mask the update")
        state = self._read(client)
        plan = state.plan if request.plan is None else request.plan
        is_pairwise = isinstance(settings, PairwiseSettings)
        if plan is None or is_pairwise != (request.plan is not None):
            raise SecureAggregationError(
                f"found a request that does not fit {settings.name}"
            )
        if plan.server_round != server_round:
            raise SecureAggregationError(
                f"found keys of round {plan.server_round}, expected those of round "
                f"{server_round}, in which this update was trained"
            )
        _require_in_range(values, settings.clip_range)
        weight = protocol.relative_weight(plan, num_examples)
        quantizer = Quantizer(settings.clip_range, settings.bits)
        encoded = quantizer.encode(values.numpy(), weight, rng.numpy())
        if is_pairwise:
            state, words = protocol.mask_pairwise(state, plan, encoded)
        else:
            state, words = protocol.mask(state, request, encoded)
        self._write(client, state)
        return torch.from_numpy(words.view("<f4"))

    def erase(self, client: str) -> None:
        """Erase the secrets of a client, if it has any."""
        if self._path(client).exists():
            self._write(client, ClientState(self._read(client).sums))

    def _read(self, client: str) -> ClientState:
        path = self._path(client)
        try:
            return _STATE.validate_json(read_plain(path))
        except FileNotFoundError:
            return ClientState()
        except ValidationError as error:
            raise SecureAggregationError(
                f"{path} is damaged; remove it, and begin a new run"
            ) from error

    def _write(self, client: str, state: ClientState) -> None:
        path = self._path(client)
        make_private(path.parent)
        write_atomically(path, _STATE.dump_json(state))

    def _path(self, client: str) -> Path:
        name = hashlib.sha256(client.encode()).hexdigest()[:24]
        return self.states / SECURE / f"{name}.json"


def _require_in_range(values: Tensor, most: float) -> None:
    """Reject an update with many numbers beyond the range.

    The server cannot notice that they are clipped: it sees only the sum.
    """
    num_clipped = int((values.abs() > most).sum())
    excess = f"{num_clipped} of {len(values)} numbers of an update beyond {most:g}"
    advice = "a larger training.secure_aggregation.clip_range"
    if num_clipped > _MOST_CLIPPED * len(values):
        raise SecureAggregationError(
            f"found {excess}, expected none: set {advice}",
            reason=SafeReason(Code.CLIP_RANGE),
        )
    if num_clipped:
        log.warning("%s are clipped; consider %s", excess, advice)
