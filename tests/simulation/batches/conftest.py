"""What the tests of batches share."""

from pathlib import Path
from typing import Any

import pytest

import knnper.simulation.batches.family as family_runs
from knnper.server.run_folder import RunFolder
from knnper.simulation.engines import simulate
from tests.simulation.batches.small_sweep import WORKERS, in_this_process


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs in this process, but in tests that are about others."""
    if "processes" not in request.node.name:
        monkeypatch.setattr(WORKERS, in_this_process)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Return a list that grows with each run: its folder, and the rounds it had."""
    runs: list[tuple[Path, int]] = []

    def noted(bench: Any, folder: RunFolder, *others: Any) -> Any:
        runs.append((folder.path, len(folder.rounds())))
        return simulate(bench, folder, *others)

    monkeypatch.setattr(family_runs, "simulate", noted)
    return runs
