"""The command that a user types, as a process that tests can watch and end."""

import contextlib
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KNNPER = Path(sys.executable).with_name("knnper")


def simulate(*arguments: str | Path) -> None:
    """Run ``knnper simulate`` to its end."""
    command = [KNNPER, "simulate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start ``knnper simulate`` into ``folder``, in a process group of its own."""
    return subprocess.Popen(
        [KNNPER, "simulate", *arguments, "--output", folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have it ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a run has made ``count`` rounds."""
    path = folder / "rounds.jsonl"
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, "the run ended too soon"
        time.sleep(0.005)


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield process id and name of all processes that ``pid`` started, and theirs."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in list(Path(f"/proc/{pid}/task").glob("*/children")):
            for child in map(int, path.read_text().split()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]
                    yield child, name.decode()
                yield from descendants(child)
