"""The state of a run is no other run's."""

import os
from pathlib import Path

import pytest

from knnper.client.runtime import ClientStateStore
from knnper.client.site import KEPT, run_states
from knnper.errors import RunError
from knnper.strategies.core.records import ModelPayload
from tests.apps.site_grid import experiment

EXPERIMENT = experiment()


def test_a_second_run_finds_nothing_of_the_first(tmp_path: Path) -> None:
    import torch

    first = ClientStateStore(run_states(tmp_path, EXPERIMENT, "aa"))
    first.save("site-a", 1, ModelPayload(torch.ones(2)), keep=[0])
    again = ClientStateStore(run_states(tmp_path, EXPERIMENT, "aa"))
    assert again.load(ModelPayload, "site-a", 1) is not None
    second = ClientStateStore(run_states(tmp_path, EXPERIMENT, "bb"))
    assert second.load(ModelPayload, "site-a", 1) is None


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    folders = [run_states(tmp_path, EXPERIMENT, str(one)) for one in range(KEPT + 2)]
    for age, folder in enumerate(folders[:-1]):
        folder.mkdir(parents=True)
        os.utime(folder, (age, age))
    assert run_states(tmp_path, EXPERIMENT, "0") == folders[0]  # it is used again
    run_states(tmp_path, EXPERIMENT, str(KEPT + 1)).mkdir()
    left = {path for path in folders if path.exists()}
    assert left == {folders[0], *folders[3:]}
    assert len(left) == KEPT


@pytest.mark.parametrize("session", ["../../etc", "a/b", "a" * 65, ".."])
def test_a_session_is_no_path(tmp_path: Path, session: str) -> None:
    with pytest.raises(RunError, match="expected a session of at most 64 letters"):
        run_states(tmp_path, EXPERIMENT, session)
