"""Rounds with secure aggregation: the stages of the protocol, over a federation."""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
class _Round:
    """One round: its requests, and the state of the replies."""

    step: Step
    requests: Mapping[str, Request]  # of the training, by client
    weights: Mapping[str, int]
    tally: Tally
    fewest: float  # clients in the sum
    before_sum: Callable[[], None]
    sample: Any = None  # the first valid update, filled with zeros


class SecureRounds:
    """Makes the rounds of a run with secure aggregation."""

    def __init__(
        self,
        settings: SecAggPlusSettings | PairwiseSettings,
        assembly: Assembly,
        federation: Federation,
    ) -> None:
        self._settings = settings
        self._method = assembly.method
        self._key, self._federation = assembly.key, federation
        self._quantizer = Quantizer(settings.clip_range, settings.bits)
        # With pairwise masks, one key agreement serves all rounds of this process.
        self._execution = secrets.token_hex(8)
        self._keys: dict[str, PublicKeys] = {}
        self._num_attempts = 0

    def updates(
        self,
        step: Step,
        requests: Sequence[Request],
        weights: Mapping[str, int],
        tally: Tally,
        num_spare: float,
        before_sum: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Any]]:
        """Make a round; yield the one update that stands for the clients in its sum.

        Parameters
        ----------
        requests
            Of the training, each to one client.
        weights
            Training examples of each client in the mean.
        num_spare
            Clients that may fail.
        before_sum
            Called before clients reveal a sum.

        Raises
        ------
        TooFewClientsError
            Too many clients failed, and nothing was learned of any update.
        """
        if not FEWEST_CLIENTS <= len(requests) <= self._quantizer.most_summands:
            raise RunError(
                f"found {len(requests)} clients in a round, expected "
                f"{FEWEST_CLIENTS} to {self._quantizer.most_summands}, the most with "
                f"{self._settings.bits} bits; change training.participation or "
                "training.secure_aggregation.bits"
            )
        current = _Round(
            step,
            {request.client: request for request in requests},
            weights,
            tally,
            max(FEWEST_CLIENTS, len(requests) - num_spare),
            before_sum,
        )
        if isinstance(self._settings, SecAggPlusSettings):
            total = self._sum_with_shares(current)
        else:
            total = self._sum_of_pairs(current)
        largest = max(weights.values())
        weight_sum = sum(weights[client] / largest for client in tally.used)
        decoded = self._quantizer.decode(total, weight_sum)
        mean = torch.from_numpy((decoded / weight_sum).astype(np.float32))
        payload = requests[0].payload
        yield "", synthetic_update(self._method, payload, current.sample, mean)

    def _new_sum(self, current: _Round, execution: str, attempt: int = 1) -> SecureSum:
        server_round = current.step.server_round
        return SecureSum(
            current.weights,
            self._settings,
            server_round,
            execution,
            self._key.child("secure_graph", server_round).numpy(),
            attempt,
        )

    def _sum_with_shares(self, current: _Round) -> Words:
        name = f"{current.step.server_round}-{secrets.token_hex(8)}"
        execution = self._new_sum(current, name)
        fail = current.tally.fail
        # Stages 0 and 1: keys and shares.
        to_all = dict.fromkeys(current.requests, KeysRequest(name))
        self._ask(current.step, to_all, PublicKeys, execution.add_keys, fail)
        self._ask(current.step, execution.plans(), dict, execution.add_shares, fail)
        # Stage 2: the masked updates.
        masked = self._masked_sum(current, execution.mask_requests())
        require_enough(len(current.tally.used), current.fewest, "sent updates")

        # Stage 3: the update of a client that fails from now on is in the sum.
        def note(client: str, reason: str) -> None:
            log.warning("client %s did not help to unmask: %s", client, reason)

        unmask = execution.unmask_requests(current.tally.used)
        current.before_sum()
        self._ask(current.step, unmask, dict, execution.add_revealed, note)
        return execution.unmasked(masked)

    def _sum_of_pairs(self, current: _Round) -> Words:
        new = [client for client in current.requests if client not in self._keys]
        self._ask(
            current.step,
            dict.fromkeys(new, KeysRequest(self._execution)),
            PublicKeys,
            self._keys.__setitem__,
            current.tally.fail,
        )
        clients = [client for client in current.requests if client in self._keys]
        while True:
            require_enough(len(clients), current.fewest, "are left")
            self._num_attempts += 1
            execution = self._new_sum(current, self._execution, self._num_attempts)
            for client in clients:
                execution.add_keys(client, self._keys[client])
            requests = {
                client: MaskRequest(self._execution, plan=plan)
                for client, plan in execution.plans().items()
            }
            current.before_sum()
            current.tally.used.clear()
            current.tally.losses.clear()
            total = self._masked_sum(current, requests)
            missing = sorted({*clients} - {*current.tally.used})
            if not missing:
                return total
            for client in missing:  # it may have lost its keys
                del self._keys[client]
            clients = list(current.tally.used)
            log.warning(
                "round %d: pairwise masks need all clients; it is repeated without %s",
                current.step.server_round,
                ", ".join(missing),
            )

    def _ask(
        self,
        step: Step,
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
        secure_step = Step(Purpose.SECURE, step.server_round, ())
        for reply in self._federation.exchange(secure_step, requests):
            message = None if reply.failure else reply.record.message
            if not isinstance(message, reply_type):
                fail(reply.client, reply.failure or "found a reply of another stage")
                continue
            try:
                accept(reply.client, message)
            except SecureAggregationError as error:
                fail(reply.client, str(error))

    def _masked_sum(
        self, current: _Round, mask_requests: Mapping[str, MaskRequest]
    ) -> Words:
        """Let clients train; return the sum of the masked updates that are valid."""
        tally, method = current.tally, self._method
        checks = UpdateChecks(
            num_train=current.weights,
            update_type=method.update_type,
            update_problem=method.update_problem,
        )
        requests = []
        for client, request in current.requests.items():
            if client in mask_requests:
                checks.note_sent(client, request.payload)
                requests.append(replace(request, masking=mask_requests[client]))
            elif tally.titles.get(client, client) not in tally.failures:
                tally.fail(client, "too few of its neighbours are left")
        total = np.zeros(0, np.uint32)
        for reply in self._federation.exchange(current.step, requests):
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
            sample = current.sample = current.sample or update
            if flatten(update).layout != flatten(sample).layout:
                tally.fail(reply.client, "found an update unlike those of the others")
                continue
            list(tally.using([measured]))  # notes it
            words = masked.view(np.uint32)
            total = total + words if total.size else words
        return total
