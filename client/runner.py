"""The runner of a node: a process that loads torch and the app, and forks for messages.

A process can be ended from outside, a thread cannot. So each message has a process, and
a message that hangs does not block later messages. The node starts the runner
(`start_runner`) and sends it options and wake-up calls on standard input; the runner
asks the node for tasks over its Runtime API.
"""

import contextlib
import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

from flwr.proto.task_pb2 import Task

from knnper.client.deadline import DEADLINE_PASSED
from knnper.client.flower_node import (
    TaskQueue,
    load_app,
    report_failure,
    run_message,
)
from knnper.client.node_log import log_to_stderr
from knnper.errors import RunError
from knnper.lifeline import die_with_parent

READY = b"ready\n"  # written by a runner once everything is loaded
# Standard input and output of the runner.
_COMMANDS, _REPORT = 0, 1
_POLL_CHILD_S = 0.005
_MAX_PIPE_BYTES = 65536
_STOP_RUNNER_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerOptions:
    """How the runner reaches the node, and which app it runs.

    Attributes
    ----------
    address
        HOST:PORT of the node's Runtime API, on this machine.
    secret
        Of that API, in hexadecimal digits: no other process gets a task from it.
    parent
        Process id of the node.
    app
        MODULE:NAME of the installed ClientApp, which answers all messages.
    """

    address: str
    secret: str
    parent: int
    app: str
    verbose: bool = False


class Runner:
    """Forks a process for each task of a node."""

    def __init__(self, options: RunnerOptions) -> None:
        self._address = options.address
        self._tasks = TaskQueue(options.address, bytes.fromhex(options.secret))
        # Nearly every app needs them; they start no thread that a fork would lose.
        import faiss  # noqa: F401
        import torch  # noqa: F401

        self._app = load_app(options.app)
        # The memory that exists now stays shared with the forks.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Run tasks, one at a time, until standard input ends."""
        while os.read(_COMMANDS, _MAX_PIPE_BYTES):
            # Repeated, since a command may have come while a task ran.
            while (acquired := self._tasks.acquire()) is not None:
                task, token = acquired
                self._run(task, token)

    def _run(self, task: Task, token: str) -> None:
        reading, writing = os.pipe()
        # Not blocking: processes that the app started may hold the other end.
        os.set_blocking(reading, False)
        address = self._address

        def keep(pulled: bytes) -> None:
            os.write(writing, pulled)  # less than a pipe holds

        child = _fork(lambda: run_message(address, token, self._app, keep))
        os.close(writing)
        cause = cause_of_death(_wait_for(child))
        if cause is not None:
            log.error("the process of a message died: %s", cause)
            pulled = b""
            with contextlib.suppress(BlockingIOError):
                pulled = os.read(reading, _MAX_PIPE_BYTES)
            reason = f"the client's process died: {cause}"
            _wait_for(
                _fork(lambda: report_failure(address, token, task, pulled, reason))
            )
        os.close(reading)


def main() -> None:
    """Run the runner until standard input ends or the node does."""
    options = RunnerOptions(**json.loads(_read_line()))
    log_to_stderr(verbose=options.verbose)
    die_with_parent(options.parent)
    runner = Runner(options)
    with contextlib.suppress(BrokenPipeError):  # the node may have ended by now
        os.write(_REPORT, READY)
    os.dup2(sys.stderr.fileno(), _REPORT)  # output of apps belongs to the log
    runner.serve()
    os._exit(0)  # torch would need long to shut down


def cause_of_death(status: int) -> str | None:
    """Describe what a process with this wait status died of; None if it succeeded."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return "its deadline passed"
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(number).name}{hint}"
    code = os.WEXITSTATUS(status)
    if code == DEADLINE_PASSED:
        return "its deadline passed"
    return f"it ended with exit status {code}" if code else None


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if not child:
        _work_and_exit(parent, work)
    return child


def _work_and_exit(parent: int, work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(_COMMANDS)
        work()
        status = 0
    except BaseException:  # the parent's code must not run twice
        log.exception("a message could not be run")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait_for(child: int) -> int:
    """Return the wait status of ``child``; when the node ends, kill it and exit."""
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return status
        has_input = select.select([_COMMANDS], [], [], _POLL_CHILD_S)[0]
        # Bytes only wake the runner; the end of the pipe is the end of the node.
        if has_input and not os.read(_COMMANDS, _MAX_PIPE_BYTES):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os._exit(0)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(_COMMANDS, 1)
        if not byte:
            sys.exit("expected options on standard input, of `knnper fed client`")
        line += byte
    return line


class RunnerProcess:
    """The runner of a node, as seen by the node."""

    def __init__(self, options: RunnerOptions) -> None:
        self._app = options.app
        self._is_ready = False
        self._process = subprocess.Popen(
            # -P: the working directory is not on the path of imports.
            (sys.executable, "-P", "-m", "knnper.client.runner"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the node, which ends the runner
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
        os.set_blocking(self._process.stdin.fileno(), False)

    def wait_until_ready(self) -> None:
        """Wait until torch and the app are loaded."""
        if self._is_ready:
            return
        output = self._process.stdout
        assert output is not None
        if output.readline() != READY:
            self._process.wait()
            raise RunError(
                f"the runner ended with exit status {self._process.returncode} before "
                f"it had loaded {self._app}; its output is above"
            )
        self._is_ready = True

    def wake(self) -> None:
        """Tell the runner that there may be a task.

        Raises
        ------
        RunError
            If the runner has ended. The node then leaves the federation, and joins
            again with a new runner.
        """
        if self._process.poll() is not None:
            status = self._process.returncode
            # Flower's main loop ends by the exception, and does not log it.
            log.error("the runner ended with exit status %d; the node rejoins", status)
            raise RunError(f"the runner ended with exit status {status}")
        assert self._process.stdin is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._process.stdin.fileno(), b"\n")

    def stop(self) -> None:
        """End the runner and the process that it runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_STOP_RUNNER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def start_runner(options: RunnerOptions) -> Iterator[RunnerProcess]:
    """Yield a runner that ends with the block."""
    runner = RunnerProcess(options)
    try:
        yield runner
    finally:
        runner.stop()


if __name__ == "__main__":
    main()
