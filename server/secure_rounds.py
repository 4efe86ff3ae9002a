"""Rounds with secure aggregation: the stages of the protocol, over a federation."""

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from knnper.errors import CodecError, RunError
from knnper.privacy_settings import PairwiseSettings, SecAggPlusSettings
from knnper.secure.messages import (
    FEWEST_CLIENTS,
    KeysRequest,
    MaskRequest,
    PublicKeys,
    RevealedShares,
    RoundPlan,
    SealedShares,
    SecureAggregationError,
    SecureReply,
    SecureRequest,
    UnmaskRequest,
)
from knnper.secure.quantization import Quantizer, Words
from knnper.secure.server import (
    Graph,
    SecureSum,
    TooFewClientsError,
    pairwise_plans,
)
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.tally import Tally
from knnper.settings import plain
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.summed_updates import SummedUpdate, SummedUpdates
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
    num_spare: float
    before_sum: Callable[[], None]
    sample: SummedUpdate | None = None  # the first valid reply

    def require_enough(self) -> None:
        """Raise before anything is unmasked if the round has too many failures."""
        if len(self.tally.failures) > self.num_spare:
            raise TooFewClientsError(
                "too many clients failed: no sum is unmasked, and nothing was learned "
                "of any update"
            )


class SecureRounds:
    """Makes the rounds of a run with secure aggregation."""

    def __init__(self, assembly: Assembly, federation: Federation) -> None:
        settings = assembly.experiment.training.secure_aggregation
        if settings is None or not isinstance(assembly.method, SummedUpdates):
            raise TypeError("expected an assembly with secure aggregation")
        self._settings: SecAggPlusSettings | PairwiseSettings = settings
        self._method: SummedUpdates = assembly.method
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
        by_client = {request.client: request for request in requests}
        if not FEWEST_CLIENTS <= len(by_client) <= self._quantizer.most_summands:
            raise RunError(
                f"found {len(by_client)} clients in a round, expected "
                f"{FEWEST_CLIENTS} to {self._quantizer.most_summands}, the most with "
                f"{self._settings.bits} bits; change training.participation or "
                "training.secure_aggregation.bits"
            )
        current = _Round(step, by_client, weights, tally, num_spare, before_sum)
        if isinstance(self._settings, SecAggPlusSettings):
            total = self._sum_with_shares(current, self._settings)
        else:
            total = self._sum_of_pairs(current)
        assert current.sample is not None, "a sum has at least three clients"
        largest = max(weights[client] for client in by_client)
        weight_sum = sum(weights[client] / largest for client in tally.used)
        try:
            decoded = self._quantizer.decode(total, weight_sum)
        except ValueError as error:
            raise RunError(f"round {step.server_round}: {error}") from error
        mean = torch.from_numpy((decoded / weight_sum).astype(np.float32))
        payload = requests[0].payload
        yield "", self._method.update_of_mean(payload, current.sample, mean)

    def _sum_with_shares(self, current: _Round, settings: SecAggPlusSettings) -> Words:
        server_round = current.step.server_round
        execution = SecureSum(
            {client: current.weights[client] for client in current.requests},
            Graph(settings.neighbors, settings.threshold),
            server_round,
            f"{server_round}-{secrets.token_hex(8)}",
            json.dumps(plain(settings), sort_keys=True),
            self._key.child("secure_graph", server_round).numpy(),
        )
        fail = current.tally.fail
        # Stages 0 and 1: keys and shares.
        to_all = dict.fromkeys(current.requests, KeysRequest(execution.execution))
        self._ask(current.step, to_all, PublicKeys, execution.add_keys, fail)
        plans = execution.plans()
        self._ask(current.step, plans, SealedShares, execution.add_shares, fail)
        # Stage 2: the masked updates.
        for client, words in self._masked(current, execution.mask_requests()):
            execution.add_masked(client, words)
        current.require_enough()

        # Stage 3: the update of a client that fails from now on is in the sum.
        def note(client: str, reason: str) -> None:
            log.warning("client %s did not help to unmask: %s", client, reason)

        unmask = execution.unmask_requests()
        current.before_sum()
        self._ask(current.step, unmask, RevealedShares, execution.add_revealed, note)
        return execution.total()

    def _sum_of_pairs(self, current: _Round) -> Words:
        fail = current.tally.fail
        new = [client for client in current.requests if client not in self._keys]
        self._ask(
            current.step,
            dict.fromkeys(new, KeysRequest(self._execution)),
            PublicKeys,
            self._keys.__setitem__,
            fail,
        )
        clients = [client for client in current.requests if client in self._keys]
        while True:
            current.require_enough()
            if len(clients) < FEWEST_CLIENTS:
                raise TooFewClientsError(
                    f"{len(clients)} clients are left, expected {FEWEST_CLIENTS} or "
                    "more: nothing was learned of any update"
                )
            self._num_attempts += 1
            plans = pairwise_plans(
                {client: self._keys[client] for client in clients},
                current.weights,
                current.step.server_round,
                self._execution,
                self._num_attempts,
            )
            requests = {
                client: MaskRequest(self._execution, plan=plan)
                for client, plan in plans.items()
            }
            current.before_sum()
            current.tally.used.clear()
            current.tally.losses.clear()
            total: Words | None = None
            for _, words in self._masked(current, requests):
                total = words.copy() if total is None else np.add(total, words, total)
            if total is not None and len(current.tally.used) == len(clients):
                return total
            missing = sorted({*clients} - {*current.tally.used})
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
            record = reply.record
            message = record.message if isinstance(record, SecureReply) else None
            if reply.failure or not isinstance(message, reply_type):
                fail(reply.client, reply.failure or f"sent no {reply_type.__name__}")
                continue
            try:
                accept(reply.client, message)
            except SecureAggregationError as error:
                fail(reply.client, str(error))

    def _masked(
        self, current: _Round, mask_requests: Mapping[str, MaskRequest]
    ) -> Iterator[tuple[str, Words]]:
        """Let clients train; yield the masked updates of those that reply."""
        tally = current.tally
        requests = (
            replace(request, masking=mask_requests[client])
            for client, request in current.requests.items()
            if client in mask_requests
        )
        for client in current.requests.keys() - mask_requests.keys():
            if tally.titles.get(client, client) not in tally.failures:
                tally.fail(client, "too few of its neighbours are left")
        for reply in self._federation.exchange(current.step, requests):
            problem = reply.failure or self._problem(reply, current)
            if problem is not None:
                tally.fail(reply.client, problem)
                continue
            update: SummedUpdate = reply.record
            current.sample = current.sample or update
            weight = min(update.num_examples, current.weights[reply.client])
            tally.used.append(reply.client)
            tally.losses.append((weight, update.train_loss))
            tally.bytes_up += update.values.nbytes
            yield reply.client, update.values.numpy().view(np.uint32)

    def _problem(self, reply: Reply, current: _Round) -> str | None:
        """Describe why a masked update cannot be added to the sum; None if it can."""
        update, sample = reply.record, current.sample
        if not isinstance(update, SummedUpdate):
            return f"expected a SummedUpdate, found a {type(update).__name__}"
        count = update.num_examples
        if type(count) is not int or count < 1:
            return f"expected a number of training examples, found {count!r}"
        try:
            payload = current.requests[reply.client].payload
            self._method.template(payload, update)
        except CodecError as error:
            return str(error)
        form = update.structure, update.shapes
        if sample and form != (sample.structure, sample.shapes):
            return "expected an update like those of the other clients, found another"
        return None
