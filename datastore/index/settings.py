"""What the settings of every kind of index have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from knnper.config.ranges import NonNegativeInt
from knnper.config.sections import Settings

NUM_SPARE = 4
"""Candidates beyond k that FAISS is asked for, so that its order can be corrected."""


@dataclass(frozen=True)
class KindSettings(Settings, ABC):
    """Settings of one kind of index, and what a store has to know of the kind."""

    @property
    @abstractmethod
    def ranks_exactly(self) -> bool:
        """Whether candidates are compared anew, by exact distances to the vectors."""

    @property
    def is_exhaustive(self) -> bool:
        """Whether rough distances are exact but for rounding, and to every vector.

        Only then can candidates be beyond doubt.
        """
        return False

    @abstractmethod
    def candidates_for(self, num_neighbors: int) -> int:
        """Return how many candidates to ask for where k neighbours are wanted."""

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Return the bytes that a vector of p = ``dim`` numbers takes in the index."""


@dataclass(frozen=True)
class ExactVectorsSettings(KindSettings):
    """Settings of a kind that keeps the vectors as they are."""

    @property
    def ranks_exactly(self) -> bool:
        """True: the vectors are at hand."""
        return True

    def candidates_for(self, num_neighbors: int) -> int:
        """Return k and some to spare."""
        return num_neighbors + NUM_SPARE


@dataclass(frozen=True)
class LossySettings(KindSettings):
    """Settings of a kind that keeps less than the vectors.

    Attributes
    ----------
    rerank
        r: that many times k candidates are compared anew by exact distances to the
        original vectors. With 0 the distances to what the index kept are used.
    """

    rerank: NonNegativeInt = 0

    @property
    def ranks_exactly(self) -> bool:
        """Whether ``rerank`` is positive."""
        return self.rerank > 0

    def candidates_for(self, num_neighbors: int) -> int:
        """Return k, or r k with re-ranking."""
        return num_neighbors * max(1, self.rerank)
