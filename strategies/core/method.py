"""The base class of methods: five functions, with both halves in one file.

`Method` implements FedAvg, and a method is a subclass with the differences. Its name in
experiments is that of its file, and the catalogue finds it there.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.records import tensors_of
from knnper.seeding import RandomKey
from knnper.settings import Settings
from knnper.strategies.core.averaging import Updates, average_weights
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import (
    ModelPayload,
    ModelState,
    ModelUpdate,
    NoState,
    Record,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult, local_sgd

AS_IT_IS = "none"
"""The personalisation that adds nothing to the method."""

UNSEEN_CLIENT = ""
"""The id that stands for any client that took no part in training."""

Clients = Literal["none", "seen", "unseen", "all"]
"""Clients by whether they took part in training."""

UpdateProblem = Callable[[Any, Any], str | None]
"""``(payload, update) -> message``, or None if the update can be aggregated."""

Origin = Callable[[Any, Any], Mapping[str, Tensor]]
"""``(payload, update) -> tensors`` from which the update's tensors started, by path."""
_OF_THE_METHOD = (
    "num_rounds",
    "serves_global_model",
    "personalizes_by_inference",
    "state_type",
    "payload_type",
    "update_type",
    "client_state_type",
    "update_problem",
    "started_from",
    "takes_mean",
)


@dataclass(frozen=True)
class NoSettings(Settings):
    """The settings of a method without settings."""


class Method:
    """A method, bound to a task and its settings; FedAvg where nothing is overridden.

    State goes in and comes out: no function changes its arguments or remembers a call.
    ``rng`` is a `RandomKey` derived for the purpose, the round and the client. A
    subclass with a ``title`` is a method of the catalogue. The first paragraph of its
    docstring is the summary, and the type of its ``settings`` lists the keys of the
    section ``method`` beside the name.

    Parameters
    ----------
    task
        The learning task.
    settings
        Of ``settings_type``.

    Attributes
    ----------
    name
        The method's name in experiments: that of its module, unless set.
    title
        The method's name as papers write it.
    source
        Paper and equation or algorithm.
    upload, download
        Traffic of one client in one round, in models.
    client_state, server_state
        The states that a client and the server keep between rounds, in models.
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
        The name of its unpersonalised model in tables; None omits that row. By default
        the title.
    personalization
        The default personalisation. A method that is defined by its personalisation,
        as kNN-Per is, accepts no other.
    serves_one_model
        Whether a client's predictor is one set of weights, which can be trained on.
    holds_all_updates
        Whether the server holds all updates of a round at once, to compare them.
    takes_mean
        Whether the server half takes no more than a weighted mean of equally shaped
        updates that started from one payload, the same for all clients. A round can
        then be aggregated privately; see `strategies.core.mean_update`. Unless stated,
        false for a class that overrides `aggregate`.
    sends_gradients_only
        Whether an update depends on the client's data only through the gradients of one
        `local_sgd` with its own step, and the number of examples. Each example can then
        be private; see `strategies.core.private_examples`. Unless stated, false for a
        class that overrides `client_update`, `local_update` or `train`.
    ends_with_global_model
        Whether ``weights`` of the last state are one trained model that is useful to
        any client without personalisation. Such a model is exported, and sites serve it
        with a memory. False if the weights are only a start or a centre of the clients'
        own models, or were trained under personal layers. If true, the payload for
        `UNSEEN_CLIENT` contains these weights.
    needs_metrics
        Whether an update contains metrics of the received model or statistics of the
        client's data, beside the number of examples. A client that shares no metrics
        cannot take part.
    needs_sgd, needs_cross_entropy
        The reason why clients must train with that optimizer or that loss; empty if any
        will do.
    needs_num_rounds
        The reason why a round depends on the total number of rounds; empty if it does
        not. A finished run of such a method cannot be continued.
    serves_global_model
        Whether clients are served ``weights`` of the payload unchanged. To serve these
        with a memory, apart from the method, is then to serve the method.
    personalizes_by_inference
        Whether `personalize` and its predictor only run the payload's models forward.
        Several clients with the same payload are then personalised in one task, which
        embeds each split once.
    state_type, payload_type, update_type, client_state_type
        The records that the functions exchange.
    num_rounds
        Rounds of training that the method asks for.
    update_problem
        ``(payload, update) -> str | None``: the reason why an update, of the right type
        and finite, is no valid reply to the payload; its client then fails. None if
        each tensor of an update must have the shape of the payload's tensor of the same
        name.
    started_from
        ``(payload, update) -> {path: tensor}``: the tensors from which those of a valid
        update started. The distances moved are compared between the clients of a round;
        a tensor not listed counts by its own norm. None if each tensor started from the
        payload's tensor of the same name.
    decoded
        ``(payload, update) -> update``: decodes a client's update for `aggregate`. None
        if updates are sent as they are.
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

    takes_mean: bool = True
    sends_gradients_only: bool = True
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
        """Set name, summary and settings type from module, docstring and annotation."""
        members = cls.__dict__
        if "aggregate" in members and "takes_mean" not in members:
            cls.takes_mean = False
        trains = {"client_update", "local_update", "train"} & {*members}
        if trains and "sends_gradients_only" not in members:
            cls.sends_gradients_only = False
        if "title" not in members:
            return  # a base class of methods, not a method
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
        """Return the conflicts between ``settings`` and the rest of an experiment."""
        return ()

    def init(self, clients: Sequence[str], rng: RandomKey) -> Any:
        """Return the server's state before the first round.

        ``clients``: names of the seen clients, sorted. ``rng``: key of the run.
        """
        return ModelState(self.task.initial_weights)

    def broadcast(self, state: Any, client_id: str, rng: RandomKey) -> Any:
        """Make the payload of a client from the server's state.

        The default sends the whole state if `payload_type` is `state_type`, else its
        weights. ``client_id`` may name a client that took no part in training;
        `UNSEEN_CLIENT` stands for any of these.
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
        """Train a client in a round; return its new state and its update.

        ``client_state``: from its last round, None in its first. ``data``: its training
        and validation splits. ``server_round``: counted from 1.
        """
        rate = self.task.training.learning_rate_at(server_round)
        return NoState(), self.local_update(payload, data, rate, rng)

    def local_update(
        self, payload: Any, data: ClientData, rate: float, rng: RandomKey
    ) -> Any:
        """Return the update of a client that keeps no state between rounds.

        ``rate``: the learning rate of the round.
        """
        trained = self.train(payload.weights, data.train, rate, rng)
        return trained.update(len(data.train))

    def train(
        self, weights: Tensor, examples: Examples, rate: float, rng: RandomKey
    ) -> LocalResult:
        """Train weights (num_weights,) for one round on the training split.

        ``rate``: the learning rate of the round.
        """
        return local_sgd(self.task, weights, examples, rate, rng)

    def aggregate(self, state: Any, updates: Updates[Any]) -> Any:
        """Return the server's state after a round.

        ``updates``: a stream of ``(client_id, Update)`` in client order, never empty,
        that can be read once.
        """
        return average_weights(updates)

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        """Return the predictor of a client after the last round.

        Without any data it is the unpersonalised model, "global" in the results.
        ``payload``: made from the last state. ``client_state``: None for a client that
        took no part in training. ``data``: its training and validation splits.
        """
        return ModelPredictor(self.task, payload.weights)

    def num_weights(self, client_id: str) -> int:
        """Return the number of weights of the model that a client trains."""
        return self.task.model.num_weights

    def work(self, client_id: str) -> float:
        """Return a client's cost of an example, relative to that of the whole model."""
        return 1.0

    def bytes_up(self, client_id: str) -> int:
        """Return the bytes of a client's model in an update."""
        return 4 * self.num_weights(client_id)

    def num_coordinates(self, tensor: Tensor) -> int:
        """Return the length of the leading part of a tensor that has no buffers."""
        is_model = tensor.shape == self.task.initial_weights.shape
        return self.task.model.num_parameters if is_model else tensor.numel()


def origins(method: Method, payload: Any, update: Any) -> Mapping[str, Tensor]:
    """Return the tensors from which those of an update started, by path."""
    if method.started_from is not None:
        return method.started_from(payload, update)
    return tensors_of(payload)


class Personalizer(Method):
    """A personalisation on top of a method; forwards what it does not override.

    Parameters
    ----------
    task
        The learning task.
    method
        The method below it.
    settings
        Of ``settings_type``: the section ``personalization`` without the name.

    Attributes
    ----------
    title
        The addition to a method's title in tables, as in ``kNN``; may be empty.
    unseen
        How a client that took no part in training is served, on top of the method.
    needs_one_model
        Whether the method must serve one set of weights to each client.
    needs_proxy
        Whether the server must have examples of its own; see `Task.proxy`.
    trains
        Whether clients train in `personalize`, so that each needs a task of its own.
    """

    # Its `client_update` is that of the method below.
    sends_gradients_only = True
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

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> Any:
        return self.method.init(clients, rng)

    @override
    def broadcast(self, state: Any, client_id: str, rng: RandomKey) -> Any:
        return self.method.broadcast(state, client_id, rng)

    @override
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

    @override
    def aggregate(self, state: Any, updates: Updates[Any]) -> Any:
        return self.method.aggregate(state, updates)

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        return self.method.personalize(payload, client_state, data, rng)

    @override
    def num_weights(self, client_id: str) -> int:
        return self.method.num_weights(client_id)

    @override
    def work(self, client_id: str) -> float:
        return self.method.work(client_id)

    @override
    def bytes_up(self, client_id: str) -> int:
        return self.method.bytes_up(client_id)

    @override
    def num_coordinates(self, tensor: Tensor) -> int:
        return self.method.num_coordinates(tensor)


class AsItIs(Personalizer):
    """Clients are served the method's own predictors."""

    name = AS_IT_IS
    title = ""
    source = "the method's own"
    unseen = "what the method gives them"


AnyMethod = TypeVar("AnyMethod", bound=Method)


def changed(method: AnyMethod, **attributes: Any) -> AnyMethod:
    """Return a copy of ``method`` with other functions or attributes."""
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
"""Validates that the values of a grid differ, since each costs a client one model."""


def wrong_shape(update: Any, **shapes: tuple[int, ...]) -> str | None:
    """Name the first field of an update with a wrong shape; fields may be None."""
    for name, expected in shapes.items():
        tensor = getattr(update, name)
        shape = expected if tensor is None else tuple(tensor.shape)
        if shape != expected:
            return f"{name}: expected shape {expected}, found {shape}"
    return None


def unlike_sent(payload: Any, update: Any, name: str) -> str | None:
    """Describe how the shapes of a tuple of tensors differ from the payload's."""
    expected, shapes = (
        [tuple(tensor.shape) for tensor in getattr(record, name)]
        for record in (payload, update)
    )
    if shapes == expected:
        return None
    return f"{name}: expected tensors of shapes {expected}, found {shapes}"
