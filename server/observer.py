"""The observer of a run: receives its progress, and does nothing by default."""

import logging
from collections.abc import Mapping
from typing import Any

RoundRecord = Mapping[str, Any]
"""The figures of one round by name; under ``failures``, if there are any, why clients
failed, by client."""


class Observer:
    """Receives a run's progress, in the process that leads it; does nothing itself."""

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
