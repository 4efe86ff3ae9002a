"""Updates for secure aggregation: a client's differences as one vector, to be summed.

The client's runtime masks the vector before it leaves. The server, which gets a sum of
such vectors, makes one update of it that stands for the round.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from knnper.errors import CodecError, Problem
from knnper.experiment import Experiment, SynchronousTiming
from knnper.records import Parts, is_shape, put_together, take_apart, tensors_of
from knnper.seeding import RandomKey
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.method import Method
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import Record


@dataclass(frozen=True)
class SummedUpdate(Record):
    """A method's update as one vector.

    Attributes
    ----------
    structure
        Of the method's update, by `take_apart`.
    shapes
        Of its tensors, by path.
    values
        The differences from the payload, shape (d,). On the wire they are encoded and
        masked, and the resulting 32-bit words are viewed as float32.
    """

    num_examples: int
    train_loss: float
    structure: str
    shapes: dict[str, tuple[int, ...]]
    values: Tensor


class SummedUpdates(UpdateProcessor):
    """Turns updates into vectors, and the mean of a round's vectors into an update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.update_type = SummedUpdate

    @override
    def process(self, payload: Any, update: Any, rng: RandomKey) -> SummedUpdate:
        parts = take_apart(_uncounted(update))
        shapes = {path: tuple(tensor.shape) for path, tensor in parts.tensors.items()}
        return SummedUpdate(
            num_examples=update.num_examples,
            train_loss=update.train_loss,
            structure=parts.structure,
            shapes=shapes,
            values=differences(self.method, payload, update),
        )

    def template(self, payload: Any, summed: SummedUpdate) -> Any:
        """Return the method's update that ``summed`` describes, filled with zeros.

        Raises CodecError if the payload does not allow such an update.
        """
        shapes = summed.shapes
        if not all(is_shape(list(shape)) for shape in shapes.values()):
            raise CodecError("expected the shapes of tensors, found others")
        size = sum(math.prod(shape) for shape in shapes.values())
        if summed.values.shape != (size,):
            num_values = tuple(summed.values.shape)
            raise CodecError(f"expected {size} numbers, found {num_values}")
        tensors = {path: torch.zeros(1).expand(shapes[path]) for path in shapes}
        parts = Parts(tensors, summed.structure)
        update = _uncounted(put_together(self.method.update_type, parts))
        if take_apart(update).structure != summed.structure:
            raise CodecError("expected the structure of an update, found another")
        for path, sent in tensors_of(payload).items():
            if path in shapes and sent.shape != tensors[path].shape:
                raise CodecError(
                    f"expected {path} of shape {tuple(sent.shape)}, found "
                    f"{shapes[path]}"
                )
        self.require_origins(payload, update)
        return update

    def update_of_mean(
        self, payload: Any, summed: SummedUpdate, mean_difference: Tensor
    ) -> Any:
        """Return the update that differs from the payload by a mean of shape (d,).

        ``summed``: of any client of the round, for the names and shapes. Raises
        CodecError if it is invalid.
        """
        template = self.template(payload, summed)
        return synthetic_update(self.method, payload, template, mean_difference)


def _uncounted(update: Any) -> Any:
    """Set the two figures that differ between clients to fixed values."""
    return replace(update, num_examples=1, train_loss=math.nan)


def secure_problems(experiment: Experiment, method: type[Method]) -> Iterable[Problem]:
    """Yield what secure aggregation cannot be combined with."""
    training = experiment.training
    if training.secure_aggregation is None:
        return
    place = "training.secure_aggregation"
    if not method.takes_mean:
        yield Problem(
            place,
            f"found {method.title}, which needs the single update of each client at "
            "the server; expected null, or a method that needs only the mean of all "
            "updates, such as fedavg or knn_per",
        )
    if training.compression is not None:
        yield Problem(
            "training.compression",
            f"found {training.compression.name} with secure aggregation, which adds up "
            "encoded numbers of one fixed size; set it to null, or lower "
            "training.secure_aggregation.bits",
        )
    if training.timing != SynchronousTiming():
        yield Problem(
            "training.timing",
            "found a round that does not wait for its clients, expected synchronous "
            "without over_selection and deadline_s: the clients of a masked sum are "
            "fixed before they train",
        )
