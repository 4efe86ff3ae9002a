"""A client's part in secure aggregation: its secrets and the sums it has unmasked.

Each message may be handled by another process, so the secrets are written to a private
folder between the stages of a round. They are erased before the last reply leaves.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from knnper.experiment import Experiment
from knnper.files import make_private, read_plain, write_atomically
from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.secure import client as protocol
from knnper.secure.messages import (
    KeysRequest,
    MaskRequest,
    RoundPlan,
    SecureAggregationError,
    SecureReply,
    SecureRequest,
)
from knnper.secure.quantization import Quantizer
from knnper.seeding import RandomKey
from knnper.settings import plain

SECURE = "secure"
"""In the folder of the clients' states."""
_MOST_CLIPPED = 0.01  # of the numbers of an update

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class _Kept:
    """The file of a client.

    Attributes
    ----------
    secrets
        Of the execution in progress; None without any.
    sums
        By round, a fingerprint of the clients in the sum that it has helped to unmask.
    """

    secrets: protocol.ClientSecrets | None = None
    sums: dict[str, str] = field(default_factory=dict)


_KEPT = TypeAdapter(_Kept)


@dataclass(frozen=True)
class SecureSums:
    """The part that the clients of a process have in the secure sums of a run.

    Attributes
    ----------
    settings
        The experiment's ``training.secure_aggregation``.
    folder
        A private folder, with a file for each client.
    """

    settings: SecAggPlusSettings | PairwiseSettings
    folder: Path

    @classmethod
    def of(cls, experiment: Experiment, states: Path) -> "SecureSums | None":
        """Return the secure sums of an experiment; None if it has none.

        ``states``: the folder of the clients' states.
        """
        settings = experiment.training.secure_aggregation
        return None if settings is None else cls(settings, states / SECURE)

    def answer(self, client: str, request: SecureRequest) -> SecureReply:
        """Return the reply of a stage without the model."""
        kept, message = self._read(client), request.message
        if isinstance(message, KeysRequest):
            text = json.dumps(plain(self.settings), sort_keys=True)
            secrets, keys = protocol.make_keys(message, text)
            self._write(client, replace(kept, secrets=secrets))
            return SecureReply(keys)
        secrets = self._secrets(kept)
        if isinstance(message, RoundPlan):
            secrets, shares = protocol.share_secrets(secrets, message)
            self._write(client, replace(kept, secrets=secrets))
            return SecureReply(shares)
        revealed = protocol.unmask(secrets, message)
        server_round, digest = protocol.clients_of_sum(secrets, message)
        if kept.sums.get(str(server_round), digest) != digest:
            raise SecureAggregationError(
                f"round {server_round} was summed before over other clients: the "
                "difference of both sums would show single updates. Resume the run "
                "when the same clients are online, or begin a new one"
            )
        sums = {**kept.sums, str(server_round): digest}
        self._write(client, _Kept(None, sums))
        return SecureReply(revealed)

    def masked(
        self,
        client: str,
        request: MaskRequest,
        values: Tensor,
        num_examples: int,
        server_round: int,
        rng: RandomKey,
    ) -> Tensor:
        """Return an update's differences, float32 (d,), encoded and masked.

        The result is float32 (d,) of any bits. ``rng``: for unbiased rounding.
        """
        kept = self._read(client)
        secrets = self._secrets(kept)
        plan = secrets.plan if request.plan is None else request.plan
        is_pairwise = isinstance(self.settings, PairwiseSettings)
        if plan is None or is_pairwise != (request.plan is not None):
            raise SecureAggregationError(
                f"found a request that does not fit {self.settings.name}"
            )
        if plan.server_round != server_round:
            raise SecureAggregationError(
                f"found keys of round {plan.server_round}, expected those of round "
                f"{server_round}, in which this update was trained"
            )
        self._require_in_range(values)
        weight = protocol.relative_weight(plan, num_examples)
        quantizer = Quantizer(self.settings.clip_range, self.settings.bits)
        encoded = quantizer.encode(values.numpy(), weight, rng.numpy())
        if is_pairwise:
            secrets, words = protocol.mask_pairwise(secrets, plan, encoded)
        else:
            secrets, words = protocol.mask(secrets, request, encoded)
        self._write(client, replace(kept, secrets=secrets))
        return torch.from_numpy(words.view(np.float32))

    def erase(self, client: str) -> None:
        """Erase the secrets of a client, if it has any."""
        if self._path(client).exists():
            self._write(client, replace(self._read(client), secrets=None))

    def _require_in_range(self, values: Tensor) -> None:
        """Reject an update with many numbers beyond the range.

        The server cannot notice that they are clipped: it sees only the sum.
        """
        most = self.settings.clip_range
        num_clipped = int((values.abs() > most).sum())
        excess = f"{num_clipped} of {len(values)} numbers of an update beyond {most:g}"
        advice = "a larger training.secure_aggregation.clip_range"
        if num_clipped > _MOST_CLIPPED * len(values):
            raise SecureAggregationError(f"found {excess}, expected none: set {advice}")
        if num_clipped:
            log.warning("%s are clipped; consider %s", excess, advice)

    def _secrets(self, kept: _Kept) -> protocol.ClientSecrets:
        if kept.secrets is None:
            raise SecureAggregationError(
                "found a request without an exchange of keys before it, or after the "
                "last one of its round"
            )
        return kept.secrets

    def _read(self, client: str) -> _Kept:
        path = self._path(client)
        try:
            return _KEPT.validate_json(read_plain(path))
        except FileNotFoundError:
            return _Kept()
        except ValidationError as error:
            raise SecureAggregationError(
                f"{path} is damaged; remove it, and begin a new run"
            ) from error

    def _write(self, client: str, kept: _Kept) -> None:
        make_private(self.folder)
        write_atomically(self._path(client), _KEPT.dump_json(kept))

    def _path(self, client: str) -> Path:
        name = hashlib.sha256(client.encode()).hexdigest()[:24]
        return self.folder / f"{name}.json"
