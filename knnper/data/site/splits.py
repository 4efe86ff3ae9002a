"""Which of a site's examples are trained on, tuned on and tested on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from knnper.config.ranges import NonNegativeInt, ProperFraction
from knnper.config.sections import Settings

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class FractionSettings(Settings):
    """How examples are split that are not split already.

    Attributes
    ----------
    validation, test
        Parts of all examples; the rest is trained on.
    seed
        Another seed is another split.
    """

    validation: ProperFraction = 0.2
    test: ProperFraction = 0.1
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"found {self.validation} + {self.test} for validation and test, "
                "which leaves nothing to train on; expected a sum less than 1"
            )


def split_by_name(names: Sequence[str], fractions: FractionSettings) -> list[Split]:
    """Return the split of each example.

    An example's split depends on its name and the settings alone, so it stays where it
    is when others are added. Only where no example would be left to train on, the one
    that comes nearest to it is trained on.

    Parameters
    ----------
    names
        Of the examples.
    fractions
        Of the splits; they are met on average.
    """
    places = [_place(name, fractions.seed) for name in names]
    splits = [_split_at(place, fractions) for place in places]
    if splits and "train" not in splits:
        splits[max(range(len(places)), key=places.__getitem__)] = "train"
    return splits


def _split_at(place: float, fractions: FractionSettings) -> Split:
    if place < fractions.test:
        return "test"
    held_out = fractions.test + fractions.validation
    return "validation" if place < held_out else "train"


def _place(name: str, seed: int) -> float:
    """Return a number in [0, 1) that is as good as random, but always the same."""
    text = f"{seed}\0{name}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    # 53 bits are what a float holds exactly: more could round up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
