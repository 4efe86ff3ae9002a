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


@pytest.mark.slow
def test_a_kill_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.client.state.killed_installs"]
    done = subprocess.run(
        [*program, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=True,
        timeout=120,
    )
    outcomes: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    new = {"model": NEW, "num_stored": 12, "is_consistent": True}
    old = {"model": OLD, "num_stored": 10, "is_consistent": True}
    left = [
        "audit.jsonl",
        "identity.json",
        "models",
        "offered.json",
        "serving.json",
        "store",
    ]
    for name, before in (("first", None), ("later", old)):
        trials = outcomes[name]
        assert len(trials) > 5
        was_killed = [trial["was_killed"] for trial in trials]
        assert was_killed == [*(len(trials) - 1) * [True], False]
        answers = [trial["found"] for trial in trials]
        # Once the new state is reached, no later kill falls back behind it.
        first = answers.index(new)
        assert first > 0
        assert answers == [*first * [before], *(len(answers) - first) * [new]]
        for trial in trials:
            # The next installation brings the new state, and nothing else is left.
            assert trial["after"] == new
            assert [name for name in trial["leftovers"] if ".lock" not in name] == left
