"""Which of a user's samples are tested on."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from knnper.config.ranges import NonNegativeInt, PositiveInt, ProperFraction
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey


@dataclass(frozen=True, kw_only=True)
class DividingSettings(Settings):
    """How each user's samples are divided into training and test data.

    Attributes
    ----------
    test_fraction
        Part of each user's samples that are tested on, rounded, [0, 1); 0.2 in the
        paper (knn-per.txt, section 5). One sample at least is left to train on.
    split
        Which they are: ``random`` ones, as in the paper, or with ``time`` the last.
    seed
        Of the random choice.
    min_samples
        Users with fewer samples are left out.
    """

    test_fraction: ProperFraction = 0.2
    split: Literal["random", "time"] = "random"
    seed: NonNegativeInt = 0
    min_samples: PositiveInt = 1


def mark_tested(count: int, user: str, settings: DividingSettings) -> NDArray[np.bool_]:
    """Mark what is tested on among ``count`` samples of a user, shape (count,).

    It depends on nothing that other users have.
    """
    num_tested = min(int(settings.test_fraction * count + 0.5), max(count - 1, 0))
    places = np.arange(count)
    if settings.split == "random":
        key = RandomKey(settings.seed, ("test samples", user))
        places = key.numpy().permutation(count)
    mask = np.zeros(count, dtype=bool)
    mask[places[count - num_tested :]] = True
    return mask
