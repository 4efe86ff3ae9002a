"""What an update must be like, beside what was sent under the same name.

Each function makes a `Method.update_problem`. What arrives has the fields and types of
the method's record; which shapes its tensors have, and how many are in a tuple, is the
client's choice.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from strategies.core.method import UpdateProblem

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
