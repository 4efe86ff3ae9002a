"""Who has which images before and after a shift of the clients' distributions."""

from dataclasses import dataclass

import numpy as np

from knnper.config.errors import RunError
from knnper.config.ranges import PositiveFloat, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from simulation.figures.options import DriftOptions
from simulation.partition.assignment import Assignment, Integers
from simulation.partition.dirichlet import DirichletSettings, dirichlet


@dataclass(frozen=True)
class StreamSettings(Settings):
    """How the images are dealt and arrive.

    Attributes
    ----------
    num_clients
        M; 100 in the paper.
    alpha
        Of both Dirichlet draws; 0.3 in the paper.
    num_steps
        T, batches that arrive in all; 100 in the paper.
    shift_at
        t_0, the batches among them from before the shift; 50 in the paper.
    """

    num_clients: PositiveInt = DriftOptions.clients
    alpha: PositiveFloat = DriftOptions.alpha
    num_steps: PositiveInt = DriftOptions.steps
    shift_at: PositiveInt = DriftOptions.shift_at


@dataclass(frozen=True, eq=False)
class DriftStream:
    """One client's images, as indices into a data set's splits.

    Attributes
    ----------
    initial
        Training images in the store at first.
    batches
        T batches of training images, in the order in which they arrive; of a small
        client some are empty.
    tests
        Test images of the distribution before and after the shift.
    """

    initial: Integers
    batches: tuple[Integers, ...]
    tests: tuple[Integers, Integers]


FEWEST_IMAGES = 10
"""Training images of a client on average; with fewer, most batches are empty."""


def require_enough_images(num_train: int, num_clients: int) -> None:
    """Refuse more clients than there are images for.

    Parameters
    ----------
    num_train
        Training images of all clients.
    num_clients
        M.

    Raises
    ------
    RunError
        With the most clients there can be.
    """
    most = num_train // FEWEST_IMAGES
    if num_clients > most:
        raise RunError(
            f"found {num_clients} clients, expected at most {most}: there are "
            f"{num_train} training images, and a client needs {FEWEST_IMAGES} on "
            "average; give fewer clients"
        )


def drift_streams(
    train_labels: Integers,
    test_labels: Integers,
    settings: StreamSettings,
    key: RandomKey,
) -> tuple[DriftStream, ...]:
    """Return the stream of each client.

    knn-per.txt, Appendix B, "Robustness to distribution shift": p_y and p'_y are drawn
    for each label, and each of them deals all images. Half of a client's training
    images from p is its first store, the rest its first t_0 batches; those from p' are
    the other T - t_0. Where p' gave a client more training images than p, the two are
    swapped for that client: so |S_m| ≥ |S'_m| (footnote 6) and no image is left out.

    Parameters
    ----------
    train_labels, test_labels
        int64, shapes (n_train,) and (n_test,).
    settings
        Numbers of clients and steps.
    key
        Fixes every random choice.
    """
    one, other = (
        dirichlet(
            train_labels,
            test_labels,
            DirichletSettings(num_clients=settings.num_clients, alpha=settings.alpha),
            key.child("draw", number),
        )
        for number in (1, 2)
    )
    return tuple(
        _stream(client, one, other, settings, key.child("order", client))
        for client in range(settings.num_clients)
    )


def _stream(
    client: int,
    one: Assignment,
    other: Assignment,
    settings: StreamSettings,
    key: RandomKey,
) -> DriftStream:
    if len(one.train[client]) < len(other.train[client]):
        one, other = other, one
    before = key.child("before").numpy().permutation(one.train[client])
    after = key.child("after").numpy().permutation(other.train[client])
    half = (len(before) + 1) // 2
    num_after = settings.num_steps - settings.shift_at
    batches = [
        *np.array_split(before[half:], settings.shift_at),
        *np.array_split(after, num_after),
    ]
    tests = one.test[client], other.test[client]
    return DriftStream(before[:half], tuple(batches), tests)
