"""The clients of a run, and how much data each has."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)  # there may be a million
class Member:
    """A client of a run.

    Attributes
    ----------
    seen
        Whether it takes part in training.
    num_train, num_validation, num_test
        Examples of each split.
    is_claim
        Whether only the client itself knows ``num_train``.
    title
        Name in the results, if that is not ``name``.
    """

    name: str
    seen: bool
    num_train: int
    num_validation: int
    num_test: int
    is_claim: bool = False
    title: str = ""

    @property
    def num_examples(self) -> int:
        """Number of examples in all splits."""
        return self.num_train + self.num_validation + self.num_test


@dataclass(frozen=True)
class Roster:
    """The clients when a run begins, which stay the same until it ends.

    Attributes
    ----------
    members
        Sorted by name; iterated as often as needed.
    split
        Hash of the partition.
    """

    members: Iterable[Member]
    split: str

    @classmethod
    def of(cls, members: Iterable[Member], split: str) -> "Roster":
        """Make the roster of ``members``, which may have any order."""
        return cls(tuple(sorted(members, key=lambda member: member.name)), split)

    def names(self) -> list[str]:
        """Return the names of all clients, sorted."""
        return [member.name for member in self.members]

    def titles(self) -> dict[str, str]:
        """Return the titles of clients, where they differ from the names."""
        return {member.name: member.title for member in self.members if member.title}

    def trainable(self) -> dict[str, int]:
        """Return the training examples of each seen client that has any."""
        return {member.name: member.num_train for member in self._training()}

    def claimed(self) -> frozenset[str]:
        """Return the `trainable` clients that claim their number themselves."""
        return frozenset(member.name for member in self._training() if member.is_claim)

    def num_validation(self) -> dict[str, int]:
        """Return the number of validation examples of each `trainable` client."""
        return {member.name: member.num_validation for member in self._training()}

    def sizes(self) -> dict[str, int]:
        """Return the number of examples of each client, in all splits."""
        return {member.name: member.num_examples for member in self.members}

    def seen(self) -> frozenset[str]:
        """Return the clients that are not held out from training."""
        return frozenset(member.name for member in self.members if member.seen)

    def _training(self) -> Iterator[Member]:
        return (
            member for member in self.members if member.seen and member.num_train > 0
        )
