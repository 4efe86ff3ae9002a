"""Commands as processes of their own, which are gone when a test is over."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

BIN = Path(sys.executable).parent
KNNPER = BIN / "knnper"
BIN_IN_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
LOCALHOST = "127.0.0.1"
MARK = "KNNPER_TEST_MARK"
FAR_TOO_LONG_S = 300.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def wait_until(
    condition: Callable[[], object],
    what: str = "what is waited for",
    timeout_s: float = FAR_TOO_LONG_S,
) -> None:
    """Return when ``condition`` holds; fail when that takes too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at, each another one."""
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server((LOCALHOST, 0)))
            for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    return free_ports(1)[0]


class Running:
    """A command that was started in a session of its own; its words go to a file."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.log = log
        with log.open("ab") as words:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=_as_typed_by_a_user,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def written(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, pattern: str, timeout_s: float = FAR_TOO_LONG_S) -> str:
        """Return what was written that matches ``pattern``, or its first group."""
        found: list[str] = []

        def is_written() -> bool:
            ended = self.ended  # before the look, which then sees all
            match = re.search(pattern, self.written)
            found.extend([match[match.lastindex or 0]] if match else [])
            assert found or not ended, f"{self.log.stem} ended without {pattern!r}"
            return bool(found)

        wait_until(is_written, f"{self.log.stem} writes {pattern!r}", timeout_s)
        return found[0]

    def wait(self, timeout_s: float = FAR_TOO_LONG_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """End it as an operator does; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(40)

    def kill(self) -> None:
        """End it as a power cut does; its children are not told."""
        self.process.kill()
        self.wait()


class Commands:
    """All that a test starts; everything is ended with the block."""

    def __init__(
        self, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.logs = logs
        self._environment = environment or {}
        self._mark = uuid.uuid4().hex
        self._started: list[Running] = []
        logs.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a command; what it writes goes to ``NAME.log``, or ``NAME-2.log``."""
        number = sum(one.log.stem.split(".")[0] == name for one in self._started) + 1
        log = self.logs / (f"{name}.{number}.log" if number > 1 else f"{name}.log")
        running = Running(command, log, {**self.environment, **(environment or {})})
        self._started.append(running)
        return running

    def run(self, name: str, *command: str | Path) -> str:
        """Run a command to its end, which is to be a good one; return its words."""
        running = self.start(name, command)
        status = running.wait()
        assert status == 0, f"{name} ended with {status}: {running.written}"
        return running.written

    @property
    def environment(self) -> dict[str, str]:
        """What every command is given."""
        return {
            **os.environ,
            MARK: self._mark,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            **self._environment,
        }

    def processes(self, name: str = "") -> dict[int, str]:
        """Return the commands of all that runs, by process id, if they hold a name."""
        found = dict(_marked(self._mark))
        return {pid: words for pid, words in found.items() if name in words}

    def the_process(self, name: str) -> int:
        """Return the only process whose command holds ``name``."""
        wait_until(lambda: self.processes(name), f"a process {name}")
        (pid,) = self.processes(name)
        return pid

    def end(self) -> None:
        """Kill everything, by id, whatever became of its parent."""
        for running in self._started:
            with contextlib.suppress(ProcessLookupError):
                running.process.kill()
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for running in self._started:
            running.process.wait()

    def last_words(self, num_lines: int = 60) -> Iterator[tuple[str, str]]:
        """Yield the name and the end of every log."""
        for path in sorted(self.logs.parent.rglob("*.log"), key=os.path.getmtime):
            lines = path.read_text(errors="replace").splitlines()
            place = path.relative_to(self.logs.parent)
            yield str(place), "\n".join(lines[-num_lines:])


def _as_typed_by_a_user() -> None:
    """Take Ctrl-C, and die with the tests, should these be killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield id and command of the processes whose environment holds the mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        # It may be gone by now, or another user's.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(folder.name), words.decode(errors="replace")
