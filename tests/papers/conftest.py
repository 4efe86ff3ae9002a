"""What all tests of figures share: a finished run, and no worker processes."""

from pathlib import Path

import pytest

from tests.simulation.batches.small_sweep import WORKERS, in_this_process
from tests.simulation.finished_run import finished_run


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORKERS, in_this_process)


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two unseen clients."""
    return finished_run(tmp_path_factory.mktemp("runs"), unseen_fraction=0.34)
