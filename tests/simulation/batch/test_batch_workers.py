"""Worker processes that end before their work is done."""

import multiprocessing
from typing import Any

import pytest

import simulation.batch.workers as workers
from knnper.config.errors import RunError
from tests.simulation.batch.doomed import Doomed, die


def test_a_worker_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "play", die)
    families: list[Any] = [Doomed(), Doomed()]
    with pytest.raises(RunError, match=r"worker process was killed.*fewer .*--workers"):
        list(workers.play_side_by_side(families, 1))
    assert multiprocessing.active_children() == []
