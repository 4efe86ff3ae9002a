"""Records: what travels between server and client, and what is kept between rounds."""

import functools
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Record:
    """Base of states, payloads and updates: a frozen dataclass that can be encoded.

    A field is a float32 tensor, a number, a string, a bool, None, another record, a
    tuple of any of these, or a dict from strings to any of these.
    """


@dataclass(frozen=True)
class NoState(Record):
    """The state of a client that remembers nothing between rounds."""


@dataclass(frozen=True)
class ModelState(Record):
    """The server's state where it is one model.

    Attributes
    ----------
    weights
        w, shape (num_weights,).
    """

    weights: Tensor


@dataclass(frozen=True)
class ModelPayload(Record):
    """One model on its way to a client.

    Attributes
    ----------
    weights
        w, shape (num_weights,).
    """

    weights: Tensor


@runtime_checkable
class Update(Protocol):
    """What every method's update carries beside its own fields.

    Attributes
    ----------
    num_examples
        n_m, the training examples it is based on; its weight in a mean.
    train_loss
        Mean loss over the mini-batches of this round.
    """

    @property
    def num_examples(self) -> int:
        """Return n_m."""

    @property
    def train_loss(self) -> float:
        """Return the mean loss over this round's mini-batches."""


@dataclass(frozen=True)
class ModelUpdate(Record):
    """One trained model on its way to the server.

    Attributes
    ----------
    weights
        w_m, shape (num_weights,).
    num_examples, train_loss
        See `Update`.
    """

    weights: Tensor
    num_examples: int
    train_loss: float


def extended(base: type[Record], name: str, new: str, of_type: Any) -> type[Record]:
    """Return a type of records with the fields of ``base`` and one after them.

    Parameters
    ----------
    base
        The method's own type.
    name
        Of the new type.
    new, of_type
        Name and type of the field.

    Raises
    ------
    ValueError
        If ``base`` has a field of that name.
    """
    # mypy takes the hash of a class for that of its instances.
    return _extended(base, name, new, of_type)  # type: ignore[arg-type]


@functools.cache
def _extended(base: type[Record], name: str, new: str, of_type: Any) -> type[Record]:
    """Make the type; one for the same arguments, so that equal types are the same."""
    if new in {one.name for one in fields(base)}:
        raise ValueError(f"{base.__name__} already has a field {new!r}; rename one")
    # By keyword alone, since fields of the base may have defaults.
    extra = (new, of_type, field(kw_only=True))
    namespace = {"__module__": __name__}
    return make_dataclass(
        name, [extra], bases=(base,), namespace=namespace, frozen=True
    )


def with_field(record_type: type[Record], base: Record, **new: Any) -> Record:
    """Return ``base``, with the ``new`` field, as a record of an `extended` type.

    ``base`` may be extended too: a method's payload may be its state.
    """
    names = [one.name for one in fields(record_type) if one.name not in new]
    return record_type(**{name: getattr(base, name) for name in names}, **new)
