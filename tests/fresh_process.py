"""Python code in a process that has loaded torch and nothing of ours.

It is forked from one that has loaded torch, so that a second is saved each time.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["torch"])
_SECONDS = 60.0


def run_fresh(code: str, folder: Path) -> CompletedProcess[str]:
    """Return how the code ended and what it wrote, by way of files in a folder."""
    written = folder / "stdout.log", folder / "stderr.log"
    process = _FORKED.Process(target=_run, args=(code, *written))
    process.start()
    process.join(_SECONDS)
    status = process.exitcode
    process.kill()
    assert status is not None, f"not done within {_SECONDS} s"
    return CompletedProcess(code, status, *(path.read_text() for path in written))


def _run(code: str, *written: Path) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), written, strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    exec(code, {"__name__": "__main__"})
