"""Rounds with secure aggregation: the stages of the protocol, over a federation."""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from knnper.errors import RunError
from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.records import flatten, tensors_of
from knnper.secure.messages import (
    FEWEST_CLIENTS,
    KeysRequest,
    MaskRequest,
    PublicKeys,
    RoundPlan,
    SecureAggregationError,
    SecureRequest,
    UnmaskRequest,
)
from knnper.secure.quantization import Quantizer, Words
from knnper.secure.server import SecureSum, require_enough
from knnper.server.federation import Federation, Request, Step
from knnper.server.screening import UpdateChecks
from knnper.server.tally import Tally
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.mean_update import (
    as_vector,
    synthetic_update,
    with_vector,
)
from knnper.transport.messages import Purpose

R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass
class PairwiseKeys:
    """The key agreement of pairwise masks, which serves all rounds of a process."""

    execution: str = field(default_factory=lambda: secrets.token_hex(8))
    by_client: dict[str, PublicKeys] = field(default_factory=dict)
    num_sums: int = 0  # with these keys


@dataclass
class SecureRound:
    """A round with secure aggregation.

    Attributes
    ----------
    keys
        Of this process, with pairwise masks.
    requests
        Of the training, by client.
    weights
        Training examples of each client in the mean.
    num_spare
        Clients that may fail.
    before_sum
        Called before clients reveal a sum.
    """

    settings: SecAggPlusSettings | PairwiseSettings
    assembly: Assembly
    federation: Federation
    keys: PairwiseKeys
    step: Step
    requests: Mapping[str, Request]
    weights: Mapping[str, int]
    tally: Tally
    num_spare: float
    before_sum: Callable[[], None]
    _sample: Any = None  # the first valid update, filled with zeros

    def updates(self) -> Iterator[tuple[str, Any]]:
        """Make the round; yield the one update that stands for the clients in its sum.

        Raises
        ------
        TooFewClientsError
            Too many clients failed, and nothing was learned of any update.
        """
        settings, count = self.settings, len(self.requests)
        quantizer = Quantizer(settings.clip_range, settings.bits)
        if not FEWEST_CLIENTS <= count <= quantizer.most_summands:
            raise RunError(
                f"found {count} clients in a round, expected {FEWEST_CLIENTS} to "
                f"{quantizer.most_summands}, the most with {settings.bits} bits; "
                "change training.participation or training.secure_aggregation.bits"
            )
        if isinstance(settings, SecAggPlusSettings):
            total = self._sum_with_shares()
        else:
            total = self._sum_of_pairs()
        largest = max(self.weights.values())
        weight_sum = sum(self.weights[client] / largest for client in self.tally.used)
        decoded = quantizer.decode(total, weight_sum)
        mean = torch.from_numpy((decoded / weight_sum).astype(np.float32))
        first = next(iter(self.requests.values()))
        method = self.assembly.method
        yield "", synthetic_update(method, first.payload, self._sample, mean)

    @property
    def _fewest(self) -> float:
        """Clients that a sum must contain."""
        return max(FEWEST_CLIENTS, len(self.requests) - self.num_spare)

    def _new_sum(self, execution: str, attempt: int) -> SecureSum:
        server_round = self.step.server_round
        rng = self.assembly.key.child("secure_graph", server_round).numpy()
        return SecureSum(
            execution, self.weights, self.settings, server_round, rng, attempt
        )

    def _sum_with_shares(self) -> Words:
        name = f"{self.step.server_round}-{secrets.token_hex(8)}"
        execution = self._new_sum(name, attempt=1)
        fail = self.tally.fail
        # Stages 0 and 1: keys and shares.
        to_all = dict.fromkeys(self.requests, KeysRequest(name))
        self._ask(to_all, PublicKeys, execution.add_keys, fail)
        self._ask(execution.plans(), dict, execution.add_shares, fail)
        # Stage 2: the masked updates.
        masked = self._masked_sum(execution.mask_requests())
        require_enough(len(self.tally.used), self._fewest, "sent updates")

        # Stage 3: the update of a client that fails from now on is in the sum.
        def note(client: str, reason: str) -> None:
            log.warning("client %s did not help to unmask: %s", client, reason)

        unmask = execution.unmask_requests(self.tally.used)
        self.before_sum()
        self._ask(unmask, dict, execution.add_revealed, note)
        return execution.unmasked(masked)

    def _sum_of_pairs(self) -> Words:
        keys = self.keys
        new = [client for client in self.requests if client not in keys.by_client]
        self._ask(
            dict.fromkeys(new, KeysRequest(keys.execution)),
            PublicKeys,
            keys.by_client.__setitem__,
            self.tally.fail,
        )
        clients = [client for client in self.requests if client in keys.by_client]
        while True:
            require_enough(len(clients), self._fewest, "are left")
            keys.num_sums += 1
            execution = self._new_sum(keys.execution, keys.num_sums)
            for client in clients:
                execution.add_keys(client, keys.by_client[client])
            requests = {
                client: MaskRequest(keys.execution, plan=plan)
                for client, plan in execution.plans().items()
            }
            self.before_sum()
            self.tally.used.clear()
            self.tally.losses.clear()
            total = self._masked_sum(requests)
            missing = sorted({*clients} - {*self.tally.used})
            if not missing:
                return total
            for client in missing:  # it may have lost its keys
                del keys.by_client[client]
            clients = list(self.tally.used)
            log.warning(
                "round %d: pairwise masks need all clients; it is repeated without %s",
                self.step.server_round,
                ", ".join(missing),
            )

    def _ask(
        self,
        messages: Mapping[str, KeysRequest | RoundPlan | UnmaskRequest],
        reply_type: type[R],
        accept: Callable[[str, R], None],
        fail: Callable[[str, str], None],
    ) -> None:
        """Send each client its message of a stage, and pass on the valid replies."""
        requests = (
            Request((client,), SecureRequest(message))
            for client, message in messages.items()
        )
        secure_step = Step(Purpose.SECURE, self.step.server_round, ())
        for reply in self.federation.exchange(secure_step, requests):
            message = None if reply.failure else reply.record.message
            if not isinstance(message, reply_type):
                fail(reply.client, reply.failure or "found a reply of another stage")
                continue
            try:
                accept(reply.client, message)
            except SecureAggregationError as error:
                fail(reply.client, str(error))

    def _masked_sum(self, mask_requests: Mapping[str, MaskRequest]) -> Words:
        """Let clients train; return the sum of the masked updates that are valid."""
        tally, method = self.tally, self.assembly.method
        checks = UpdateChecks(
            num_train=self.weights,
            update_type=method.update_type,
            update_problem=method.update_problem,
        )
        requests = []
        for client, request in self.requests.items():
            if client in mask_requests:
                checks.note_sent(client, request.payload)
                requests.append(replace(request, masking=mask_requests[client]))
            elif tally.titles.get(client, client) not in tally.failures:
                tally.fail(client, "too few of its neighbours are left")
        total = np.zeros(0, np.uint32)
        for reply in self.federation.exchange(self.step, requests):
            masked = np.zeros(0, np.float32)
            if reply.failure is None:
                # Masked numbers are random; the rest of an update can be checked.
                masked = as_vector(tensors_of(reply.record)).numpy()
                zeros = with_vector(reply.record, torch.zeros(len(masked)))
                reply = replace(reply, record=zeros)
            (measured,) = checks.usable([reply], tally.fail)
            if measured is None:
                continue
            update = replace(measured.update, num_examples=1, train_loss=math.nan)
            sample = self._sample = self._sample or update
            if flatten(update).layout != flatten(sample).layout:
                tally.fail(reply.client, "found an update unlike those of the others")
                continue
            list(tally.using([measured]))  # notes it
            words = masked.view(np.uint32)
            total = np.add(total, words, out=total) if total.size else words.copy()
        return total
