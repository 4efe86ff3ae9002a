"""The entries of rounds in an audit log."""

import logging
from typing import Any

from knnper.server.observer import LoggingObserver


def test_entry_of_a_round_has_failures_and_participants() -> None:
    entries: list[tuple[str, dict[str, Any]]] = []
    observer = LoggingObserver(
        logging.getLogger("flwr"), lambda event, **more: entries.append((event, more))
    )
    figures = {"num_clients": 1, "num_failed": 1, "failures": {"b": "rejected"}}
    record = {**figures, "participants": {"a": 2}, "train_loss": 0.5, "seconds": 1.0}
    observer.round_finished({**record, "server_round": 3})
    expected = {**figures, "participants": {"a": 2}, "round": 3}
    assert entries == [("round_finished", expected)]
