"""What the tests of batches share."""

from typing import Any

import pytest

import knnper.simulation.batches.runner as playing
from knnper.server.run_folder import RunFolder
from knnper.simulation.run import simulate


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each run, by the rounds that it had."""
    runs: list[int] = []

    def noted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        runs.append(len(folder.rounds()))
        return simulate(bench, folder, *others)

    monkeypatch.setattr(playing, "simulate", noted)
    return runs
