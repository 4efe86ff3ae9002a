"""The shape of a method: five functions, both halves of it in one file.

`Method` is FedAvg: a method is a subclass that holds what differs from it. The file's
name is what an experiment calls it, and the catalogue finds it by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem
from knnper.experiment import Experiment, Settings
from knnper.records import tensors_of
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.records import (
    ModelPayload,
    ModelState,
    ModelUpdate,
    NoState,
    Record,
)
from knnper.strategies.core.task import ModelPredictor, Predictor, Task
from knnper.strategies.core.training import LocalResult, local_sgd

AS_IT_IS = "none"
"""The personalisation that adds nothing to a method's own."""

UNSEEN_CLIENT = ""
"""The id that stands for any client that took no part in training."""

Clients = Literal["none", "seen", "unseen", "all"]
"""Clients by whether they took part in training."""

UpdateProblem = Callable[[Any, Any], str | None]
"""``(payload, update) -> what is wrong``, or None if the update can be aggregated."""

Origin = Callable[[Any, Any], Mapping[str, Tensor]]
"""``(payload, update) -> what the update's tensors started from``, by their path."""


@dataclass(frozen=True)
class NoSettings(Settings):
    """There is nothing to set."""


class Method:
    """A method, bound to a task and its settings; FedAvg but for what is overridden.

    State goes in and comes out: no function changes its arguments or remembers a
    call. ``rng`` is always a `RandomKey` of its own for (purpose, round, client).
    A subclass with a title is a method of the catalogue: the first paragraph of its
    docstring is the summary, and the annotation of ``settings`` says what the section
    ``method`` of an experiment takes beside the name.

    Parameters
    ----------
    task
        What is learned.
    settings
        Of ``settings_type``.

    Attributes
    ----------
    name
        What experiments call it; the name of its module.
    title
        The method's name as papers write it.
    source
        Paper and equation or algorithm.
    upload, download
        Traffic of one client in one round, in models.
    client_state, server_state
        What a client and the server keep between rounds, in models.
    unseen
        How a client that took no part in training is served.
    learns_from_validation
        Which clients train in `personalize` and then learn from their validation split
        as well. `without_validation` of their predictor is the model trained without
        that split.
    trains_unseen_from_start
        Whether `personalize` trains weights of an unseen client from the start, and so
        at the learning rate of the first round, `Task.first_rate`.
    chooses_on_validation
        Whether `personalize` chooses a cluster, a weight or a model by its score on the
        validation split, so that even `without_validation` depends on that split.
    allows_batch_norm
        Whether the model may contain BatchNorm layers.
    reference_title
        What its unpersonalised model is called in tables; None if it has none worth
        a row. By default the title.
    personalization
        What is put on top where an experiment does not say; a method that is known
        by a name of its own for it, as kNN-Per, takes nothing else.
    serves_one_model
        Whether a client's predictor is one set of weights, which can be trained on.
    holds_all_updates
        Whether the server holds all updates of a round at once, to compare them.
    ends_with_global_model
        Whether ``weights`` of the last state are one trained model that is of use to
        any client by itself: it is exported, and sites keep it and serve it with a
        memory. Not so where they are only what the clients' own models start from or
        are pulled to, or where clients trained the rest under parts of their own. With
        it, ``weights`` of what is broadcast to a `UNSEEN_CLIENT` are these.
    needs_metrics
        Whether an update says how the received model does on the client's data, or how
        that data is made up, beside its number of examples: a client that shares no
        metrics takes no part.
    needs_sgd, needs_cross_entropy
        Why clients must train with that optimizer, or that loss, where they must.
    needs_num_rounds
        Why the rounds depend on how many there are in all, where they do: a finished
        run cannot be continued then.
    serves_global_model
        Whether what a client is served rests on ``weights`` of the payload as they
        are: to serve them with a memory, apart from the method, is to serve the method.
    personalizes_by_inference
        Whether `personalize` and what it returns only run the models of the payload
        forward and train none. Clients that are sent the same payload are then served
        several in one task, each split embedded once.
    state_type, payload_type, update_type, client_state_type
        The records that the functions exchange.
    num_rounds
        Rounds of training that the method asks for.
    update_problem
        ``(payload, update) -> str | None``: why an update, of the right type and all
        finite, cannot be the answer to the payload. A client whose update has a problem
        fails, and nobody else. None where every tensor of an update has one of the same
        name in the payload: it must have that one's shape.
    started_from
        ``(payload, update) -> {path: tensor}``: what the tensors of an update that has
        no problem started from. How far they moved from there is compared between the
        clients of a round; a tensor that is not named, by its own norm. None where it
        is what the payload has under the same name.
    decoded
        ``(payload, update) -> update``: what `aggregate` takes, of what clients send.
        None where that is the same.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    unseen: ClassVar[str] = "the global model"
    learns_from_validation: ClassVar[Clients] = "none"
    trains_unseen_from_start: ClassVar[bool] = False
    chooses_on_validation: ClassVar[bool] = False
    allows_batch_norm: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = NoSettings
    upload: ClassVar[str] = "1"
    download: ClassVar[str] = "1"
    client_state: ClassVar[str] = "0"
    server_state: ClassVar[str] = "1"
    reference_title: ClassVar[str | None] = None
    personalization: ClassVar[str] = AS_IT_IS
    serves_one_model: ClassVar[bool] = True
    holds_all_updates: ClassVar[bool] = False
    ends_with_global_model: ClassVar[bool] = False
    needs_metrics: ClassVar[bool] = False
    needs_sgd: ClassVar[str] = ""
    needs_cross_entropy: ClassVar[str] = ""
    needs_num_rounds: ClassVar[str] = ""

    serves_global_model: bool = False
    personalizes_by_inference: bool = False
    state_type: type[Record] = ModelState
    payload_type: type[Record] = ModelPayload
    update_type: type[Record] = ModelUpdate
    client_state_type: type[Record] = NoState
    update_problem: UpdateProblem | None = None
    started_from: Origin | None = None
    decoded: Callable[[Any, Any], Any] | None = None

    settings: Any

    def __init_subclass__(cls) -> None:
        """Take name, summary and type of the settings from where they stand."""
        members = cls.__dict__
        if "title" not in members:
            return  # what methods share, not a method
        cls.name = members.get("name", cls.__module__.rpartition(".")[2])
        cls.summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        cls.reference_title = members.get("reference_title", cls.title)
        annotated = get_type_hints(cls)["settings"]
        cls.settings_type = NoSettings if annotated is Any else annotated

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task = task
        self.settings = settings
        self.num_rounds = task.training.num_rounds

    @staticmethod
    def check(settings: Any, experiment: Experiment) -> Sequence[Problem]:
        """Return what in an experiment does not go together with ``settings``."""
        return ()

    def init(self, clients: Sequence[str], rng: RandomKey) -> Any:
        """Return the server's state before the first round.

        ``clients``: Names of the seen clients, sorted. ``rng``: Of the run.
        """
        return ModelState(self.task.initial_weights)

    def broadcast(self, state: Any, client_id: str, rng: RandomKey) -> Any:
        """Return the payload of a client, from the server's state.

        By default all of it, where `payload_type` is `state_type`.

        ``client_id``: May be a client that took no part in training; `UNSEEN_CLIENT`
        asks for what any such client would get.
        """
        sends_all = self.payload_type is self.state_type
        return state if sends_all else ModelPayload(state.weights)

    def client_update(
        self,
        payload: Any,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        """Return ``(ClientState, Update)`` of a client that took part in a round.

        ``payload``: What it was sent. ``client_state``: What it kept of its last round;
        None on its first visit. ``data``: Its splits. ``server_round``: From 1.
        """
        rate = self.task.training.learning_rate_at(server_round)
        return NoState(), self.local_update(payload, data, rate, rng)

    def local_update(
        self, payload: Any, data: ClientData, rate: float, rng: RandomKey
    ) -> Any:
        """Return the update of a client that keeps nothing between rounds.

        ``rate``: The learning rate of the round.
        """
        trained = self.train(payload.weights, data.train, rate, rng)
        return trained.update(len(data.train))

    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        """Return what the local training of a round makes of weights (num_weights,).

        ``examples``: The training split. ``rate``: The learning rate of the round.
        """
        return local_sgd(self.task, weights, examples, rate, rng)

    def aggregate(self, state: Any, updates: Updates[Any]) -> Any:
        """Return the server's state after a round, from that before it.

        ``updates``: A stream of ``(client_id, Update)`` in client order that can be
        read once. It is never empty.
        """
        return average_weights(updates)

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        """Return what a client serves after the last round.

        With no data at all it is the unpersonalised model: what `results` call global.

        ``payload``: What the client was sent after the last round. ``client_state``:
        None for a client that never took part. ``data``: Its training and validation
        splits.
        """
        return ModelPredictor(self.task, payload.weights)

    def num_weights(self, client_id: str) -> int:
        """Return how many weights the model has that a client trains."""
        return self.task.model.num_weights

    def work(self, client_id: str) -> float:
        """Return what an example costs a client, where the whole model's costs 1."""
        return 1.0

    def bytes_up(self, client_id: str) -> int:
        """Return how many bytes a client's model takes on its way to the server."""
        return 4 * self.num_weights(client_id)

    def num_coordinates(self, tensor: Tensor) -> int:
        """Return how many numbers of a tensor, the first ones, are no buffers."""
        is_model = tensor.shape == self.task.initial_weights.shape
        return self.task.model.num_parameters if is_model else tensor.numel()


def origins(method: Method, payload: Any, update: Any) -> Mapping[str, Tensor]:
    """Return what the tensors of an update started from, by their path."""
    if method.started_from is not None:
        return method.started_from(payload, update)
    return tensors_of(payload)


_OF_THE_METHOD = (
    *("num_rounds", "serves_global_model", "personalizes_by_inference", "state_type"),
    *("payload_type", "update_type", "client_state_type", "update_problem"),
    "started_from",
)


class Personalizer(Method):
    """What is put on top of a method: the method, but for what is overridden.

    Parameters
    ----------
    task
        What is learned.
    method
        What it is put on.
    settings
        What the section ``personalization`` takes beside the name.

    Attributes
    ----------
    title
        What is added to a method's title in tables, as in ``kNN``; empty for nothing.
    unseen
        How a client that took no part in training is served, on top of the method.
    needs_one_model
        Whether the method must serve one set of weights to each client.
    needs_proxy
        Whether the server must have examples of its own; see `Task.proxy`.
    trains
        Whether clients train, so that they are not served together.
    """

    needs_one_model: ClassVar[bool] = False
    needs_proxy: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    def __init__(self, task: Task, method: Method, settings: Settings) -> None:
        self.task = task
        self.method = method
        self.settings = settings
        for name in _OF_THE_METHOD:
            setattr(self, name, getattr(method, name))
        self.personalizes_by_inference &= not self.trains

    def init(self, clients: Sequence[str], rng: RandomKey) -> Any:
        return self.method.init(clients, rng)

    def broadcast(self, state: Any, client_id: str, rng: RandomKey) -> Any:
        return self.method.broadcast(state, client_id, rng)

    def client_update(
        self,
        payload: Any,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        update = self.method.client_update
        return update(payload, client_state, data, server_round, rng)

    def aggregate(self, state: Any, updates: Updates[Any]) -> Any:
        return self.method.aggregate(state, updates)

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        return self.method.personalize(payload, client_state, data, rng)

    def num_weights(self, client_id: str) -> int:
        return self.method.num_weights(client_id)

    def work(self, client_id: str) -> float:
        return self.method.work(client_id)

    def num_coordinates(self, tensor: Tensor) -> int:
        return self.method.num_coordinates(tensor)


class AsItIs(Personalizer):
    """Clients are served what the method itself gives them."""

    name = AS_IT_IS
    title = ""
    source = "the method's own"
    unseen = "what the method gives them"


AnyMethod = TypeVar("AnyMethod", bound=Method)


def changed(method: AnyMethod, **attributes: Any) -> AnyMethod:
    """Return ``method`` with other functions or attributes; it stays as it is."""
    other = copy(method)
    vars(other).update(attributes)
    return other


def _all_differ(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(values)) < len(values):
        raise ValueError(
            f"found {list(values)}, expected values that all differ, since each costs "
            "a model; name each one once"
        )
    return values


ALL_DIFFER = AfterValidator(_all_differ)
"""On a grid of values for each of which a client trains or scores a model."""


def wrong_shape(update: Any, **shapes: tuple[int, ...]) -> str | None:
    """Return which field of an update has another shape; one that is None has none."""
    for name, expected in shapes.items():
        tensor = getattr(update, name)
        shape = expected if tensor is None else tuple(tensor.shape)
        if shape != expected:
            return f"{name}: expected shape {expected}, found {shape}"
    return None


def unlike_sent(payload: Any, update: Any, name: str) -> str | None:
    """Return how a tuple of tensors differs from what was sent, but for the numbers."""
    expected, shapes = (
        [tuple(tensor.shape) for tensor in getattr(record, name)]
        for record in (payload, update)
    )
    if shapes == expected:
        return None
    return f"{name}: expected tensors of shapes {expected}, found {shapes}"
