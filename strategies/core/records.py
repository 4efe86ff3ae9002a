"""Records: the messages between server and client, and their states between rounds."""

from dataclasses import dataclass

from torch import Tensor

from knnper.errors import TrainingDivergedError
from knnper.records import is_finite, tensors_of


@dataclass(frozen=True)
class Record:
    """Base of states, payloads and updates: a frozen dataclass that can be encoded.

    A field is a float32 tensor, a number, a string, a bool, None, another record, a
    tuple of any of these, or a dict from strings to any of these.
    """


@dataclass(frozen=True)
class NoState(Record):
    """The state of a client that keeps nothing between rounds."""


@dataclass(frozen=True)
class ModelState(Record):
    """The server's state in methods that train one model."""

    weights: Tensor  # w, shape (num_weights,)


@dataclass(frozen=True)
class ModelPayload(Record):
    """One model, sent to a client."""

    weights: Tensor  # w, shape (num_weights,)


@dataclass(frozen=True)
class ModelUpdate(Record):
    """One trained model, sent to the server."""

    weights: Tensor  # w_m, shape (num_weights,)
    num_examples: int
    train_loss: float


def require_finite(noun: str, record: object) -> None:
    """Raise TrainingDivergedError if a number of a client's record is not finite.

    ``noun`` names the record in the message, as in "update".
    """
    for name, tensor in tensors_of(record).items():
        if not is_finite(tensor):
            raise TrainingDivergedError(
                f"{name} of the client's {noun} is not finite: training diverged; "
                "lower training.learning_rate"
            )
