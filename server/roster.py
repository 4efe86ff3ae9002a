"""The clients of a run, as far as the server knows them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A client, and how much data it has.

    Attributes
    ----------
    name
        The client's name.
    seen
        Whether it may take part in training.
    num_train, num_validation, num_test
        Examples in its splits.
    """

    name: str
    seen: bool
    num_train: int
    num_validation: int
    num_test: int

    @property
    def num_examples(self) -> int:
        """Examples in all splits."""
        return self.num_train + self.num_validation + self.num_test


@dataclass(frozen=True)
class Roster:
    """Who there is when a run begins, and the same until it ends.

    Attributes
    ----------
    members
        The clients, sorted by name.
    split
        SHA-256, in hexadecimal, of who has which data.
    """

    members: tuple[Member, ...]
    split: str

    @classmethod
    def of(cls, members: Iterable[Member], split: str) -> "Roster":
        """Return the roster of ``members``, in any order."""
        return cls(tuple(sorted(members, key=lambda member: member.name)), split)

    def names(self) -> list[str]:
        """Return all clients, sorted."""
        return [member.name for member in self.members]

    def trainable(self) -> dict[str, int]:
        """Return the number of training examples of each client that may take part.

        These are the seen ones with data, sorted by name.
        """
        return {one.name: one.num_train for one in self._training()}

    def num_validation(self) -> dict[str, int]:
        """Return the number of validation examples of each `trainable` client."""
        return {one.name: one.num_validation for one in self._training()}

    def sizes(self) -> dict[str, int]:
        """Return the number of examples of each client, in all splits; by name."""
        return {member.name: member.num_examples for member in self.members}

    def seen(self) -> frozenset[str]:
        """Return the clients that are not held out."""
        return frozenset(member.name for member in self.members if member.seen)

    def _training(self) -> list[Member]:
        return [one for one in self.members if one.seen and one.num_train > 0]
