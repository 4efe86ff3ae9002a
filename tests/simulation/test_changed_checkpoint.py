"""Resuming a run after a digit in its newest checkpoint's history has changed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import KNNPER
from tests.simulation.finished_run import finished_run
from tests.simulation.knnper_process import outcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize(
    "pattern", [r'("medians": \[\s*)\d', r'("largest": )\d', r'("lowest_loss": )\d']
)
def test_resume_goes_back_from_a_history_with_a_changed_digit(
    original: Path, pattern: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(original, run)
    for name in ("results.json", "clients.csv"):
        (run / name).unlink()
    manifest = run / "checkpoints" / "round-000002" / "manifest.json"
    written = manifest.read_text()
    changed, count = re.subn(pattern, r"\g<1>9", written, count=1)
    assert (count, changed == written) == (1, False)
    manifest.write_text(changed)
    ended = subprocess.run(
        [KNNPER, "simulate", "--resume", run],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "manifest.json is not what was written" in ended.stderr
    # The second round was made again, and is as it was.
    assert manifest.read_text() == written
    assert outcome(run) == outcome(original)
