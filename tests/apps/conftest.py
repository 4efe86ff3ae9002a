from pathlib import Path

import pytest
from flwr.supercore.task_identity import TaskIdentity

from tests.apps.site_grid import experiment, make_sites


@pytest.fixture
def inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made by a process that takes part in a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return make_sites(tmp_path, experiment())
