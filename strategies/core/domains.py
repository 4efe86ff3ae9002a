"""To which domain an example belongs: its client's group, and its own kind."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from knnper.config.errors import ConfigError, Problem
from knnper.data.examples import Examples
from strategies.core.denominators import denominator
from strategies.core.task import Task


def groups_of(
    clients: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the number of the group of each client: a named one or its own.

    Parameters
    ----------
    clients
        Names of the seen clients.
    groups
        Names of clients that are together, by the group's name. Others than the seen
        clients may be among them.

    Raises
    ------
    ConfigError
        If a named group has none of the clients.
    """
    empty = [name for name, members in groups.items() if not {*members} & {*clients}]
    if empty:
        message = (
            f"found none of the seen clients in {', '.join(empty)}, expected one at "
            f"least; seen clients are called {', '.join(clients[:3])} and so on"
        )
        raise ConfigError([Problem("method.groups", message)])
    named = {client: name for name, members in groups.items() for client in members}
    keys = [(client in named, named.get(client, client)) for client in clients]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return {client: numbers[key] for client, key in zip(clients, keys, strict=True)}


def shares_and_losses(
    task: Task, weights: Tensor, examples: Examples, kinds: Tensor, num_kinds: int
) -> tuple[Tensor, Tensor]:
    """Return the share of each kind of example, and its mean loss; 0 without any.

    Parameters
    ----------
    task
        Gives the architecture; the model is in evaluation mode.
    weights
        Shape (num_weights,).
    examples
        n of them.
    kinds
        Of each example, int64 of shape (n,), below ``num_kinds``.
    num_kinds
        The length of both results.
    """
    losses = task.losses(weights, examples)
    counts = torch.bincount(kinds, minlength=num_kinds)
    sums = torch.zeros(num_kinds).index_add_(0, kinds, losses)
    return counts / max(1, len(examples)), sums / counts.clamp_min(1)


def example_weights_of(
    label_factors: Tensor | None, examples: Examples
) -> Tensor | None:
    """Return each example's factor, shape (n,), with mean 1; or all 0.

    Parameters
    ----------
    label_factors
        Of each label; with None there are none.
    examples
        n of them.
    """
    if label_factors is None:
        return None
    factors = label_factors[examples.labels]
    return factors / denominator(factors.mean())
