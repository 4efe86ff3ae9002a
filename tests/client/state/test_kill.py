"""A kill at any step of an installation leaves what was served, or what is to be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.state.small_site import small_model

OLD, NEW = small_model(seed=0).fingerprint, small_model(seed=1).fingerprint


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `killed_installs` finds."""
    program = "tests.client.state.killed_installs"
    done = subprocess.run(
        [sys.executable, "-m", program, str(tmp_path_factory.mktemp("killed"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=True,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_there_were_many_steps(outcomes: dict[str, Any]) -> None:
    for trials in outcomes.values():
        assert len(trials) > 5
        *killed, last = (one["was_killed"] for one in trials)
        assert (all(killed), last) == (True, False)


def test_a_first_installation_is_whole_or_not_there(outcomes: dict[str, Any]) -> None:
    whole = {"model": NEW, "num_stored": 12, "is_consistent": True}
    found = [one["writer"] for one in outcomes["first"]]
    assert found[0] is None
    assert found[-1] == whole
    assert all(one in (None, whole) for one in found)


def test_a_later_one_leaves_the_old_state_or_the_new(outcomes: dict[str, Any]) -> None:
    old = {"model": OLD, "num_stored": 10, "is_consistent": True}
    new = {"model": NEW, "num_stored": 12, "is_consistent": True}
    found = [one["writer"] for one in outcomes["later"]]
    assert found[0] == old
    assert found[-1] == new
    assert all(one in (old, new) for one in found)
    # Once the new state is reached, no later kill falls back behind it.
    first = found.index(new)
    assert all(one == new for one in found[first:])
    # Whoever only reads sees the same model, if not the last examples yet.
    readers = [one["reader"]["model"] for one in outcomes["later"]]
    assert readers == [one["model"] for one in found]


def test_the_next_installation_brings_the_new_state(outcomes: dict[str, Any]) -> None:
    new = {"model": NEW, "num_stored": 12, "is_consistent": True}
    kept = ["identity.json", "models", "offered.json", "serving.json", "store"]
    for trial in (*outcomes["first"], *outcomes["later"]):
        assert trial["after"] == new
        assert [one for one in trial["leftovers"] if ".lock" not in one] == kept
