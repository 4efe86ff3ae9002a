"""Training, validation and personalisation of clients, the same in every engine."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.client.secure_sums import SecureSums
from knnper.client.state_store import ClientStateStore
from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.errors import KnnPerError, OwnCodeError
from knnper.metrics import Compute
from knnper.own import explained
from knnper.predictions import RunPredictions
from knnper.records import tensors_of
from knnper.secure.messages import MaskRequest
from knnper.seeding import RandomKey
from knnper.strategies.core import evaluation
from knnper.strategies.core.compression import CompressedUpdate
from knnper.strategies.core.embedding_pool import EmbeddingPool
from knnper.strategies.core.mean_update import differences, with_vector
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.records import NoState, require_finite

R = TypeVar("R")


class DataSource(Protocol):
    """Data of the clients of this process, by client name."""

    def data(self, client: str) -> ClientData:
        """Return the training and validation splits of ``client``."""

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``; read once, by the evaluation."""

    def test_names(self, client: str) -> Sequence[str] | NDArray[np.int64]:
        """Return the names of the test examples of ``client``, or their indices."""

    def class_weights(self, client: str) -> Tensor | None:
        """Return the weight of a test example of each label, float64 (c,).

        None weighs all examples equally.
        """

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""


@dataclass(frozen=True)
class Personalized:
    """A client after the model distribution.

    Attributes
    ----------
    reference
        Payload of the unpersonalised model.
    predictor
        The method's personalised predictor.
    seen
        Whether the client may take part in training.
    """

    reference: Any
    predictor: Predictor
    seen: bool


@dataclass(frozen=True)
class Served:
    """Predictions of the test split by the model that a site serves from now on.

    Attributes
    ----------
    personal, reference
        Probabilities of the personalised and of the global model, float32 (n, c).
    chosen
        Hyper-parameters that were chosen, such as λ, by name.
    """

    personal: Tensor
    reference: Tensor
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class TrainingRequest:
    """A client's training in one round.

    Attributes
    ----------
    payload
        The method's payload for the client.
    server_round
        The round of the payload's model.
    state_round
        The client resumes from its newest state of this round or before.
    keep_rounds
        Rounds that the server may resume from; their states are kept.
    counted_round
        The later round in which the update is aggregated, if not ``server_round``.
    masking
        How to mask the update, with secure aggregation.
    """

    client: str
    payload: Any
    server_round: int
    state_round: int
    keep_rounds: Sequence[int]
    counted_round: int = 0
    masking: MaskRequest | None = None


@dataclass(frozen=True)
class ClientRuntime:
    """A method bound to the data and the states of the clients of this process.

    Attributes
    ----------
    method, spec, source, states
        The method, the form of its inputs, the clients' data and their states.
    key
        The experiment's root key.
    pool
        Embeddings that the method's task can reuse.
    keep
        Called with each client that has received the model. Returns the predictions of
        the model that the client serves from now on, or None to test the predictor.
    metrics
        Additional metrics of the test split, by name.
    predictions
        Writer of the predictions of the test split, if they are saved.
    explain
        Turns a client's error into the text that is sent to the server.
    secure_sums
        The clients' part in secure aggregation.
    """

    method: Method
    spec: InputSpec
    source: DataSource
    states: ClientStateStore
    key: RandomKey
    pool: EmbeddingPool
    keep: Callable[[Personalized], Served | None] = lambda _: None
    metrics: Mapping[str, Compute] = field(default_factory=dict)
    predictions: RunPredictions | None = None
    explain: Callable[[KnnPerError], str] = str
    secure_sums: SecureSums = field(default_factory=lambda: SecureSums(None, Path()))

    @explained()
    def train(self, request: TrainingRequest) -> Any:
        """Train a client in one round; return the method's update."""
        client, server_round = request.client, request.server_round
        state, update = self.method.client_update(
            request.payload,
            self._load_state(client, request.state_round, delete_later=True),
            self.source.data(client),
            server_round,
            self.key.child("client_update", server_round, client),
        )
        # A compressed update holds bytes of a code, made of numbers that were finite.
        if not isinstance(update, CompressedUpdate):
            require_finite("update", update)
        require_finite("state", state)
        if not isinstance(state, NoState):
            state_round = request.counted_round or server_round
            self.states.save(client, state_round, state, request.keep_rounds)
        return self._released(request, update)

    def _released(self, request: TrainingRequest, update: Any) -> Any:
        """Return the update that leaves: masked, with secure aggregation."""
        if self.secure_sums.settings is None:
            return update
        client, server_round = request.client, request.server_round
        masked = self.secure_sums.masked(
            client,
            request.masking,
            differences(self.method, request.payload, update),
            update.num_examples,
            server_round,
            self.key.child("secure_sum", server_round, client),
        )
        return with_vector(update, masked)

    @explained()
    def validate(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object | None = None,
        server_round: int = 0,
        state_rounds: Sequence[int] = (),
    ) -> evaluation.Validation:
        """Evaluate models on the clients' validation splits; no state changes.

        Parameters
        ----------
        payload
            The method's payload, or without ``reference`` that of the unpersonalised
            model, which is then the only one evaluated.
        reference
            Payload of the unpersonalised model.
        state_rounds
            For each client, the round of the state to personalise with.
        """
        predict_global = self.unpersonalised(
            payload if reference is None else reference
        )
        data = {client: self.source.data(client) for client in clients}
        held_out = [splits.validation for splits in data.values()]
        # One batch per client, as at a site: the last bits depend on the batch.
        probabilities = torch.cat(
            [predict_global(examples.images) for examples in held_out]
        )
        labels = torch.cat([examples.labels for examples in held_out])
        global_score = evaluation.score(probabilities, labels)
        if reference is None:
            return evaluation.Validation(global_score)
        rounds = dict(zip(clients, state_rounds, strict=True))
        halves = {client: _halves(data[client].validation) for client in clients}
        failures: dict[str, str] = {}

        def count_correct(client: str) -> int:
            state = self._load_state(client, rounds[client])
            num_correct = 0
            # Hyper-parameters that are chosen on one half are tested on the other.
            pairs = zip(halves[client], reversed(halves[client]), strict=True)
            for number, (tuning_half, test_half) in enumerate(pairs):
                splits = ClientData(data[client].train, tuning_half)
                rng = self.key.child("validate", server_round, client, number)
                if len(test_half) > 0:
                    predictor = self.method.personalize(payload, state, splits, rng)
                    num_correct += evaluation.evaluate(predictor, test_half).num_correct
            return num_correct

        inputs = [
            *(splits.train for splits in data.values()),
            *itertools.chain.from_iterable(halves.values()),
        ]
        with self._embedding_once((payload, reference), inputs, keep=False):
            num_correct = call_for_each(clients, count_correct, failures, self.explain)
        num_examples = sum(len(data[client].validation) for client in num_correct)
        return evaluation.Validation(
            global_score, num_examples, sum(num_correct.values()), failures
        )

    @explained()
    def personalize(
        self,
        clients: Sequence[str],
        payload: object,
        reference: object,
        state_rounds: Sequence[int],
    ) -> evaluation.ClientResults:
        """Personalise the clients, then read their test splits: once, and only here.

        Every figure of a client has the same bits in any group of clients.
        """
        failures: dict[str, str] = {}
        rounds = dict(zip(clients, state_rounds, strict=True))
        records = (payload, reference)
        for client in clients:
            self.secure_sums.erase(client)
        predict_global = self.unpersonalised(reference)
        data = {client: self.source.data(client) for client in clients}

        # 1. Make all predictors, before any test split is read.
        def prepare(client: str) -> tuple[Predictor, evaluation.Evaluation]:
            state = self._load_state(client, rounds[client])
            rng = self.key.child("personalize", client)
            predictor = self.method.personalize(payload, state, data[client], rng)
            return predictor, evaluation.evaluate(
                predict_global, data[client].validation
            )

        splits = [
            split
            for client_data in data.values()
            for split in (client_data.train, client_data.validation)
        ]
        with self._embedding_once(records, splits):
            prepared = call_for_each(clients, prepare, failures, self.explain)
        tests = {client: self.source.test(client) for client in prepared}

        # 2. Test them.
        def report(client: str) -> evaluation.ClientResult:
            predictor, validation = prepared[client]
            test = tests[client]
            is_seen = self.source.is_seen(client)
            served = self.keep(Personalized(reference, predictor, is_seen)) or Served(
                evaluation.predict(predictor, test),
                evaluation.predict(predict_global, test),
                predictor.describe(),
            )
            if self.predictions is not None:
                self.predictions.write(
                    client,
                    is_seen,
                    self.source.test_names(client),
                    test.labels,
                    served.personal,
                    served.reference,
                )
            weights = self.source.class_weights(client)
            personal, of_reference = (
                evaluation.score(probabilities, test.labels, weights, self.metrics)
                for probabilities in (served.personal, served.reference)
            )
            return evaluation.ClientResult(
                client=client,
                seen=is_seen,
                num_train=len(data[client].train),
                num_validation=len(data[client].validation),
                personal=personal,
                reference=of_reference,
                validation=validation,
                chosen=dict(served.chosen),
            )

        with self._embedding_once(records, list(tests.values())):
            results = call_for_each(list(prepared), report, failures, self.explain)
        return evaluation.ClientResults(tuple(results.values()), failures)

    def _embedding_once(
        self,
        records: Sequence[object],
        splits: Sequence[Examples],
        *,
        keep: bool = True,
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the splits' images, which the records' models will embed repeatedly."""
        if not self.method.personalizes_by_inference:
            return contextlib.nullcontext()
        models = list(
            itertools.chain.from_iterable(
                tensors_of(record).values() for record in records
            )
        )
        images = [split.images for split in splits]
        return self.pool.holding(models, images, keep=keep)

    def _load_state(
        self, client: str, after_round: int, *, delete_later: bool = False
    ) -> Any:
        state_type = self.method.client_state_type
        if state_type is NoState:
            return None
        return self.states.load(
            state_type, client, after_round, delete_later=delete_later
        )

    def unpersonalised(self, reference: object) -> Predictor:
        """Return the predictor of a client without data."""
        no_data = ClientData(no_examples(self.spec), no_examples(self.spec))
        return self.method.personalize(
            reference, None, no_data, self.key.child("reference")
        )


def call_for_each(
    clients: Sequence[str],
    function: Callable[[str], R],
    failures: dict[str, str],
    explain: Callable[[KnnPerError], str] = str,
) -> dict[str, R]:
    """Call ``function`` for each client and return the values by client.

    A client that raises a `KnnPerError` is left out, and its reason added to
    ``failures``. An error of the user's own code would fail for all and is raised.
    """
    values = {}
    for client in clients:
        try:
            values[client] = function(client)
        except OwnCodeError:
            raise
        except KnnPerError as error:
            failures[client] = explain(error)
    return values


def _halves(examples: Examples) -> tuple[Examples, Examples]:
    """Split examples into every other one: files may lie sorted by class."""
    positions = torch.arange(len(examples))
    return examples.take(positions[::2]), examples.take(positions[1::2])
