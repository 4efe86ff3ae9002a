"""Who wants to know how a run is getting on."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RoundRecord = Mapping[str, Any]
"""The figures of one round by name; under ``failures``, if there are any, why clients
failed, by client."""


class Observer:
    """Is told of every step of a run by the process that leads it; silent as it is."""

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Say that rounds ``first_round`` (from 1) to ``num_rounds`` begin."""

    def round_finished(self, record: RoundRecord) -> None:
        """Say how a round went."""

    def personalization_started(self, num_clients: int) -> None:
        """Say that ``num_clients`` clients are about to be personalised."""

    def client_personalized(self) -> None:
        """Say that one more client is personalised and evaluated."""

    def finished(self) -> None:
        """Say that the run has ended, in whatever way."""


class LoggingObserver(Observer):
    """Writes a line a round to a log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._num_rounds = 0

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Say which rounds begin."""
        self._num_rounds = num_rounds
        if first_round <= num_rounds:
            self._log.info("training: rounds %d to %d", first_round, num_rounds)

    def round_finished(self, record: RoundRecord) -> None:
        """Say how a round went."""
        self._log.info(
            "round %d/%d: train loss %.3f, %d clients, %.1f s",
            record["server_round"],
            self._num_rounds,
            record["train_loss"],
            record["num_clients"],
            record["seconds"],
        )

    def personalization_started(self, num_clients: int) -> None:
        """Say how many clients are about to be personalised."""
        if num_clients:
            self._log.info("personalising %d clients", num_clients)

    def finished(self) -> None:
        """Say that the run has ended."""
        self._log.info("finished")


@dataclass(frozen=True)
class Member:
    """A client, and how much data it has."""

    name: str
    seen: bool
    num_train: int
    num_validation: int
    num_test: int
    is_claim: bool = False

    @property
    def num_examples(self) -> int:
        """Examples in all splits."""
        return self.num_train + self.num_validation + self.num_test


@dataclass(frozen=True)
class Roster:
    """Who there is when a run begins, and the same until it ends."""

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
        """Return the number of training examples of each client that may take part."""
        return {one.name: one.num_train for one in self._training()}

    def claimed(self) -> frozenset[str]:
        """Return the `trainable` clients of whose number only they know."""
        return frozenset(member.name for member in self._training() if member.is_claim)

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


def capped(
    counts: Mapping[str, int], claimed: Collection[str], most: float
) -> dict[str, int]:
    """Return counts of which no claimed one is more than a share of the total."""
    claims = sorted((counts[name] for name in counts if name in claimed), reverse=True)
    rest = sum(counts.values())
    limit = claims[-1] if claims else 0
    for num_cut, claim in enumerate([*claims, 0]):
        # With so many clients at the limit, it is this part of what the others have.
        if rest == 0 or num_cut * most >= 1:
            break
        share = most * rest / (1 - num_cut * most)
        if claim <= share:
            limit = max(1, int(share))
            break
        rest -= claim
    return {
        name: min(count, limit) if name in claimed else count
        for name, count in counts.items()
    }
