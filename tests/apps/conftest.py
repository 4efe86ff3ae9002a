import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made by a process that takes part in a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
