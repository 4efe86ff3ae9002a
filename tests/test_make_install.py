"""``make install`` says what it does, shows why pip fails, and can be interrupted."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUM_PACKAGES = (ROOT / "constraints.txt").read_text().count("==")
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp {pip} "$3/bin/python"
else exec {python} "$@"; fi
"""


def start(folder: Path, pip: str) -> "subprocess.Popen[str]":
    """Start it for an environment in ``folder``, with a shell script in pip's place."""
    for name, text in (("pip", f"#!/bin/sh\n{pip}\n"), ("python", PYTHON)):
        script = folder / name
        script.write_text(text.format(pip=folder / "pip", python=sys.executable))
        script.chmod(0o755)
    variables = [f"VENV={folder / 'venv'}", f"PYTHON={folder / 'python'}"]
    return subprocess.Popen(
        ["make", "--no-print-directory", "install", *variables],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Tests that run in the background ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]


def test_it_says_what_it_does(tmp_path: Path) -> None:
    made = start(tmp_path, "echo Collecting torch; echo noise; sleep 1.5")
    told, _ = made.communicate(timeout=60)
    assert made.returncode == 0, told
    assert f"{NUM_PACKAGES} packages" in told
    assert "install.log" in told
    assert "source" in told.splitlines()[-1]
    assert "noise" not in told
    assert len(told.splitlines()) < 10
    assert "noise" in (tmp_path / "venv/install.log").read_text()
    assert (tmp_path / "venv/.installed").is_file()


def test_a_failure_shows_the_error_of_pip(tmp_path: Path) -> None:
    made = start(tmp_path, "seq 100; echo ERROR: no such package >&2; exit 3")
    told, _ = made.communicate(timeout=60)
    assert made.returncode != 0
    assert "ERROR: no such package" in told
    assert "\n50\n" not in told
    assert not (tmp_path / "venv/.installed").exists()


def test_interrupted_it_ends_pip_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    made = start(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600")
    deadline = time.monotonic() + 30
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(made.pid, signal.SIGINT)
    made.communicate(timeout=30)
    assert made.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not (tmp_path / "venv/.installed").exists()
