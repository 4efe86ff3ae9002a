"""What a client does when it is asked: the same code in every engine."""

from dataclasses import dataclass
from typing import Any, Protocol

from client.state_store import ClientStateStore
from knnper.config.errors import TrainingDivergedError
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.transport.codec import is_finite, take_apart
from strategies.core.evaluation import ClientResult, Evaluation, evaluate
from strategies.core.method import Method
from strategies.core.records import NoState


class DataSource(Protocol):
    """Where a client's data comes from."""

    def data(self, client: str) -> ClientData:
        """Return what ``client`` learns from."""

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``; read once, by the evaluation."""

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""


@dataclass(frozen=True)
class ClientRuntime:
    """A method, bound to the data and the memory of the clients of this process.

    Attributes
    ----------
    method
        What the clients do.
    spec
        Of the data; gives the shape of "no data".
    source
        The clients' data.
    states
        The clients' memory.
    key
        The experiment's root key.
    """

    method: Method
    spec: InputSpec
    source: DataSource
    states: ClientStateStore
    key: RandomKey

    def train(
        self, client: str, payload: object, server_round: int, keep_round: int
    ) -> Any:
        """Train in one round; return the method's update.

        Raises
        ------
        TrainingDivergedError
            If the update or the client's new state is not finite. The state from
            before the round is kept.
        """
        state, update = self.method.client_update(
            payload,
            self._state(client, server_round),
            self.source.data(client),
            server_round,
            self.key.child("client_update", server_round, client),
        )
        _require_finite("update", update)
        _require_finite("state", state)
        if not isinstance(state, NoState):
            self.states.save(client, server_round, state, keep_round)
        return update

    def validate(self, client: str, reference: object) -> Evaluation:
        """Evaluate the unpersonalised model on the client's validation split."""
        predictor = self._unpersonalised(client, reference)
        return evaluate(predictor, self.source.data(client).validation)

    def personalize(
        self, client: str, payload: object, reference: object, last_round: int
    ) -> ClientResult:
        """Personalise, then read the test split: once, and only here."""
        data, test = self.source.data(client), self.source.test(client)
        predictor = self.method.personalize(
            payload,
            self._state(client, last_round + 1),
            data,
            self.key.child("personalize", client),
        )
        unpersonalised = self._unpersonalised(client, reference)
        return ClientResult(
            client=client,
            seen=self.source.is_seen(client),
            num_train=len(data.train),
            num_validation=len(data.validation),
            personal=evaluate(predictor, test),
            reference=evaluate(unpersonalised, test),
            validation=evaluate(unpersonalised, data.validation),
            chosen=dict(predictor.describe()),
        )

    def _state(self, client: str, before_round: int) -> Any:
        state_type = self.method.client_state_type
        if state_type is NoState:
            return None
        return self.states.load(state_type, client, before_round)

    def _unpersonalised(self, client: str, reference: object) -> Any:
        """Return what the method gives to a client without data: its global model."""
        nothing = ClientData(no_examples(self.spec), no_examples(self.spec))
        key = self.key.child("reference", client)
        return self.method.personalize(reference, None, nothing, key)


def _require_finite(what: str, record: object) -> None:
    for name, tensor in take_apart(record).tensors.items():
        if not is_finite(tensor):
            raise TrainingDivergedError(
                f"{name} of the client's {what} is not finite: training diverged; "
                "lower training.learning_rate"
            )
