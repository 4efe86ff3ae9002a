"""Worker processes: what they tell, and those that end before their work is done."""

import multiprocessing
import time
from typing import Any

import pytest

import knnper.simulation.batches.runner as workers
from knnper.errors import RunError
from knnper.simulation.batches.family import Step
from tests.simulation.batches.doomed import Doomed, chat, die


def test_processes_that_are_killed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "make_runs", die)
    families: list[Any] = [Doomed(), Doomed()]
    with pytest.raises(RunError, match=r"worker process was killed.*fewer .*--workers"):
        list(workers.run_in_workers(families, 1))
    assert multiprocessing.active_children() == []


def test_processes_tell_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "make_runs", chat)
    families: list[Any] = [Doomed()] * 3
    began = time.monotonic()
    told = [one for some in workers.run_in_workers(families, 2) for one in some]
    assert sorted(number for number, _ in told) == [0, 1, 2]
    assert {event.step for _, event in told} == {Step.ROUND}
    # The clock is one for all processes.
    assert all(began < event.at < time.monotonic() for _, event in told)
