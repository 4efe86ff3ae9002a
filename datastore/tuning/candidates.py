"""What is chosen, and from what."""

from collections.abc import Sequence
from dataclasses import dataclass

from datastore.prediction.class_prior import ClassPrior


@dataclass(frozen=True)
class Choice:
    """How a client's memory is used.

    Attributes
    ----------
    knn_weight
        λ, in [0, 1].
    num_neighbors
        k, at least 1.
    kernel_scale
        σ, positive.
    class_prior
        How the global model is adapted to the client's shares of the classes; None
        leaves it as it is.
    """

    knn_weight: float
    num_neighbors: int
    kernel_scale: float
    class_prior: ClassPrior | None = None

    @property
    def uses_memory(self) -> bool:
        """Whether anything but the global model as it is has a say."""
        return self.knn_weight > 0 or self.class_prior is not None


@dataclass(frozen=True)
class Candidates:
    """The combinations that a client chooses from; made by `candidates`.

    Of equally good ones the first counts: the smallest λ, then the smallest k, then
    the largest σ, with which neighbours count most alike.

    Attributes
    ----------
    knn_weights
        λ, ascending.
    num_neighbors
        k, ascending.
    kernel_scales
        σ, descending.
    """

    knn_weights: tuple[float, ...]
    num_neighbors: tuple[int, ...]
    kernel_scales: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of λ, k and σ."""
        return len(self.knn_weights), len(self.num_neighbors), len(self.kernel_scales)

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose."""
        return self.shape == (1, 1, 1)

    def at(self, place: Sequence[int]) -> Choice:
        """Return the combination at a place of a grid of that `shape`."""
        weight, count, scale = place
        return Choice(
            self.knn_weights[weight],
            self.num_neighbors[count],
            self.kernel_scales[scale],
        )


def weights_to_choose_from(knn_weights: Sequence[float]) -> tuple[float, ...]:
    """Return the values of λ, ascending; 0 is one wherever there are several."""
    weights = set(knn_weights)
    return tuple(sorted(weights if len(weights) == 1 else weights | {0.0}))


def candidates(
    knn_weights: Sequence[float],
    num_neighbors: Sequence[int],
    kernel_scales: Sequence[float],
) -> Candidates:
    """Return all combinations of these values, in any order and with repetitions.

    Wherever there are several λ to choose from, λ = 0, the global model alone, is one
    of them. A single λ is fixed.

    Raises
    ------
    ValueError
        If one of the three is empty.
    """
    named = {
        "knn_weight": knn_weights,
        "num_neighbors": num_neighbors,
        "kernel_scale": kernel_scales,
    }
    for name, values in named.items():
        if not values:
            raise ValueError(f"expected at least one {name} to choose from, found none")
    return Candidates(
        weights_to_choose_from(knn_weights),
        tuple(sorted(set(num_neighbors))),
        tuple(sorted(set(kernel_scales), reverse=True)),
    )
