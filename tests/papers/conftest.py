"""What all tests of figures share: a finished run, and no worker processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.batches.small_sweep import WORKERS, in_this_process
from tests.simulation.finished_run import finished_run


@pytest.fixture(autouse=True, scope="package")
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WORKERS, in_this_process)
        yield


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two unseen clients."""
    return finished_run(tmp_path_factory.mktemp("runs"), unseen_fraction=0.34)
