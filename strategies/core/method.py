"""The shape of a method: five functions, both halves of it in one file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from knnper.errors import Problem
from knnper.experiment import Experiment, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.records import NoState, Record
from knnper.strategies.core.task import Task


class Predictor(Protocol):
    """What a client serves once it is personalised."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, num_classes); rows sum to 1.

        Parameters
        ----------
        images
            uint8, shape (n, height, width, channels).
        """

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen for this client, as in ``{"knn_weight": 0.7}``."""


@runtime_checkable
class EmbeddingPredictor(Predictor, Protocol):
    """A predictor with a representation, on which a local memory can be put."""

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p), of uint8 images."""

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""

    def without_validation(self) -> "EmbeddingPredictor":
        """Return what this would be without training on the validation split.

        The predictor itself where it was not: choices alone may depend on that split.
        """


UpdateProblem = Callable[[Any, Any], str | None]
"""``(payload, update) -> what is wrong``, or None if the update can be aggregated."""

Origin = Callable[[Any, Any], Mapping[str, Tensor]]
"""``(payload, update) -> what the update's tensors started from``, by their path."""


@dataclass(frozen=True)
class Method:
    """A method, bound to a task and its settings.

    State goes in and comes out: no function changes its arguments or remembers a
    call. ``rng`` is always a `RandomKey` of its own for (purpose, round, client).

    Attributes
    ----------
    init
        ``(clients, rng) -> ServerState``. ``clients`` are the names of the seen
        clients, sorted.
    broadcast
        ``(state, client_id, rng) -> Payload``. ``client_id`` may be a client that took
        no part in training; `NEWCOMER` asks for what any such client would get.
    client_update
        ``(payload, client_state, data, server_round, rng) -> (ClientState, Update)``.
        ``client_state`` is None on a client's first visit.
    aggregate
        ``(state, updates) -> ServerState``. ``updates`` is a stream of
        ``(client_id, Update)`` in client order that can be read once. It is never
        empty.
    personalize
        ``(payload, client_state, data, rng) -> Predictor``. ``client_state`` is None
        for a client that never took part. With no data at all the predictor is the
        unpersonalised model: what `results` call global.
    state_type, payload_type, update_type, client_state_type
        The records that the functions exchange.
    num_rounds
        Rounds of training that the method asks for.
    serves_global_model
        Whether what a client is served rests on ``weights`` of the payload as they
        are: to serve them with a memory, apart from the method, is to serve the method.
    personalizes_by_inference
        Whether `personalize` and what it returns only run the models of the payload
        forward and train none. Clients that are sent the same payload are then served
        several in one task, each split embedded once.
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
    """

    init: Callable[[Sequence[str], RandomKey], Any]
    broadcast: Callable[[Any, str, RandomKey], Any]
    client_update: Callable[..., tuple[Any, Any]]
    aggregate: Callable[[Any, Iterable[tuple[str, Any]]], Any]
    personalize: Callable[..., Predictor]
    state_type: type[Record]
    payload_type: type[Record]
    update_type: type[Record]
    num_rounds: int
    client_state_type: type[Record] = NoState
    serves_global_model: bool = False
    personalizes_by_inference: bool = False
    update_problem: UpdateProblem | None = None
    started_from: Origin | None = None


AS_IT_IS = "none"
"""The personalisation that adds nothing to a method's own."""

NEWCOMER = ""
"""The client id of nobody in particular: a client that was never seen."""


def no_problems(experiment: Experiment) -> Sequence[Problem]:
    """Return that nothing is wrong: the default check of a method."""
    return ()


@dataclass(frozen=True)
class NoSettings(Settings):
    """There is nothing to set."""


@dataclass(frozen=True)
class MethodSpec:
    """An entry in the table of methods.

    Attributes
    ----------
    title
        The method's name as papers write it.
    summary
        One sentence.
    source
        Paper and equation or algorithm.
    build
        ``(task, settings) -> Method``.
    reference_title
        What its unpersonalised model is called in tables; None if it has none worth
        a row.
    upload, download
        Traffic of one client in one round, in models.
    client_state
        What a client keeps between rounds, in models.
    server_state
        What the server keeps between rounds, in models.
    unseen
        How a client that took no part in training is served.
    settings_type
        What the section ``method`` of an experiment takes beside the name.
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
        are pulled to, or where a part of them is never trained. With it, ``weights`` of
        what is broadcast to a `NEWCOMER` are these.
    needs_metrics
        Whether an update says how the received model does on the client's data, or how
        that data is made up, beside its number of examples: a client that shares no
        metrics takes no part.
    check
        Finds what in an experiment does not go together with the method.
    """

    title: str
    summary: str
    source: str
    build: Callable[[Task, Any], Method]
    upload: str
    download: str
    client_state: str
    server_state: str
    unseen: str
    reference_title: str | None
    settings_type: type[Settings] = NoSettings
    personalization: str = AS_IT_IS
    serves_one_model: bool = True
    holds_all_updates: bool = False
    ends_with_global_model: bool = False
    needs_metrics: bool = False
    check: Callable[[Experiment], Sequence[Problem]] = no_problems


def repetitions(place: str, values: Sequence[float]) -> tuple[Problem, ...]:
    """Return that a grid names a value twice; nothing if all values differ.

    Parameters
    ----------
    place
        Of the grid among the settings, as in ``method.prox_weights``.
    values
        The grid; a client trains or scores a model for each.
    """
    if len(set(values)) == len(values):
        return ()
    message = (
        f"found {list(values)}, expected values that all differ, since each costs "
        "a model; name each one once"
    )
    return (Problem(place, message),)


@dataclass(frozen=True)
class PersonalizerSpec:
    """An entry in the table of what the section ``personalization`` can name.

    Attributes
    ----------
    title
        What is added to a method's title in tables, as in ``kNN``; empty for nothing.
    summary
        One sentence.
    source
        Paper and equation or section.
    settings_type
        What the section takes beside the name.
    apply
        ``(task, method, settings) -> Method``: the method with another `personalize`.
    unseen
        How a client that took no part in training is served, on top of the method.
    needs_one_model
        Whether the method must serve one set of weights to each client.
    needs_proxy
        Whether the server must have examples of its own; see `Task.proxy`.
    check
        Finds what in an experiment does not go together with it.
    """

    title: str
    summary: str
    source: str
    settings_type: type[Settings]
    apply: Callable[[Task, Method, Any], Method]
    unseen: str
    needs_one_model: bool = False
    needs_proxy: bool = False
    check: Callable[[Experiment], Sequence[Problem]] = no_problems


Shape = tuple[int, ...]


def of_shapes(**shapes: Shape) -> UpdateProblem:
    """Return the check that tensors of an update have these shapes.

    Parameters
    ----------
    shapes
        By the name of the field. A field may be None too, where its type allows it.
    """

    def problem(payload: Any, update: Any) -> str | None:
        for name, expected in shapes.items():
            tensor = getattr(update, name)
            found = expected if tensor is None else tuple(tensor.shape)
            if found != expected:
                return f"{name}: expected shape {expected}, found {found}"
        return None

    return problem


def as_sent(name: str) -> UpdateProblem:
    """Return the check that a tuple of tensors is as it was sent, but for the numbers.

    Parameters
    ----------
    name
        Of the field, in the payload and in the update.
    """

    def problem(payload: Any, update: Any) -> str | None:
        expected, found = _shapes(payload, name), _shapes(update, name)
        if found == expected:
            return None
        return f"{name}: expected tensors of shapes {expected}, found {found}"

    return problem


def _shapes(record: Any, name: str) -> list[Shape]:
    tensors: Sequence[Tensor] = getattr(record, name)
    return [tuple(tensor.shape) for tensor in tensors]
