"""The whole story in containers."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "try_offline.sh"
UNABLE = 77


@pytest.mark.slow
def test_a_federation_in_containers() -> None:
    found = subprocess.run([SCRIPT], capture_output=True, text=True)
    if found.returncode == UNABLE:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    assert found.returncode == 0, f"{found.stdout[-8000:]}\n{found.stderr[-8000:]}"
    assert "the story is complete" in found.stdout
