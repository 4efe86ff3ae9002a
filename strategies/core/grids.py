"""Grids of values that a client chooses from."""

from collections.abc import Sequence

from knnper.config.errors import Problem


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
