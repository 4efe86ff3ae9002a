"""The partition ``pachinko``: coarse labels, then fine labels, by Dirichlet draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat
from knnper.simulation.partition.allocation import (
    Assignment,
    Integers,
    assign_counts,
    num_labels_of,
)
from knnper.simulation.partition.dirichlet import draw_log_dirichlet, normalise
from knnper.simulation.partition.settings import CountedSettings


@dataclass(frozen=True, kw_only=True)
class PachinkoSettings(CountedSettings):
    """The heterogeneity of the clients.

    Attributes
    ----------
    alpha
        α, of the coarse labels at a client; 0.3 in the paper.
    beta
        β, of the fine labels within a coarse label; 10 in the paper.
    """

    alpha: PositiveFloat = 0.3
    beta: PositiveFloat = 10.0


def pachinko(
    train_labels: Integers,
    test_labels: Integers,
    coarse_of: tuple[int, ...] | None,
    settings: PachinkoSettings,
    key: RandomKey,
) -> Assignment:
    """Let each client draw an equal share of the training samples, one after another.

    A draw is a coarse label by the client's Dir(α), then one of its fine labels by
    the client's Dir(β), then a sample of it, without replacement. Exhausted labels
    drop out and the weights are renormalised (Li and McCallum, 2006; Reddi et al.,
    2021, appendix F; Marfoq et al. 2022, section 5). Each label's test samples follow
    its training samples. ``coarse_of`` is the coarse label of each label.
    """
    num_labels = num_labels_of(train_labels, test_labels)
    coarse = _coarse_labels(coarse_of, num_labels)
    stock = np.bincount(train_labels, minlength=len(coarse))
    counts = _draw_counts(stock, coarse, settings, key)
    return assign_counts(train_labels, test_labels, counts, key)


def _coarse_labels(coarse_of: tuple[int, ...] | None, num_labels: int) -> Integers:
    if coarse_of is None:
        raise DataError(
            "the partition pachinko needs a data set with coarse labels, such as "
            "cifar100; choose that, or the partition dirichlet"
        )
    if len(coarse_of) < num_labels:
        raise DataError(
            f"the data set names the coarse label of {len(coarse_of)} labels, but has "
            f"{num_labels}"
        )
    return np.unique(np.array(coarse_of), return_inverse=True)[1]


def _draw_counts(
    stock: Integers, coarse: Integers, settings: PachinkoSettings, key: RandomKey
) -> Integers:
    """Return the number of samples by label and client, shape (num_labels, M)."""
    num_clients = settings.num_clients
    num_coarse = int(coarse.max()) + 1
    remaining = stock.copy()
    counts = np.zeros((len(stock), num_clients), dtype=np.int64)
    bounds = np.arange(num_clients + 1) * int(stock.sum()) // num_clients
    for client, size in enumerate(np.diff(bounds)):
        generator = key.child("client", client).numpy()
        coarse_logs = draw_log_dirichlet(settings.alpha, (num_coarse,), generator)
        # Unnormalised: each coarse label's fine labels are normalised on their own.
        fine_logs = draw_log_dirichlet(settings.beta, (len(stock),), generator)
        while (lacking := int(size - counts[:, client].sum())) > 0:
            weights = _label_weights(coarse_logs, fine_logs, coarse, remaining > 0)
            drawn = _draw_until_exhausted(weights, remaining, lacking, generator)
            counts[:, client] += drawn
            remaining -= drawn
    return counts


def _label_weights(
    coarse_logs: NDArray[np.float64],  # log-weights, shape (num_coarse,)
    fine_logs: NDArray[np.float64],  # shape (num_labels,)
    coarse: Integers,  # of each label
    available: NDArray[np.bool_],  # which labels still have samples; one at least
) -> NDArray[np.float64]:
    """Return the chance of each label at the next draw, shape (num_labels,)."""
    of_coarse = coarse == np.arange(len(coarse_logs))[:, None]
    usable = of_coarse & available
    open_coarse = usable.any(axis=1)
    coarse_weights = normalise(coarse_logs[open_coarse])
    fine_weights = normalise(np.where(usable, fine_logs, -np.inf)[open_coarse])
    weights: NDArray[np.float64] = coarse_weights @ fine_weights
    weights /= weights.sum()
    return weights


def _draw_until_exhausted(
    weights: NDArray[np.float64],  # shape (num_labels,); 0 for exhausted labels
    remaining: Integers,  # samples of each label
    size: int,
    generator: np.random.Generator,
) -> Integers:
    """Draw up to ``size`` labels, stop when a label is exhausted; return the counts.

    Stopping there keeps the draws exact, and since it empties a label for all
    clients it happens at most once a label.
    """
    labels = generator.choice(len(weights), size=size, p=weights)
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    occurrence = np.arange(size) - np.searchsorted(ordered, ordered) + 1
    exhausting = order[occurrence == remaining[ordered]]
    num_drawn = int(exhausting.min()) + 1 if len(exhausting) else size
    return np.bincount(labels[:num_drawn], minlength=len(weights))
