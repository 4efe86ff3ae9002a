"""The fork server: keeps torch and the app loaded, and forks for each message.

It plays the part of Flower's SuperExec. Starting Python and importing torch takes
seconds, a fork takes milliseconds; and a message still has a process of its own, which
can be killed. Run as a module; its standard input says what to do: one line of
`Orders`, then any byte when there may be a task. Its end is the node's.
"""

import gc
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import httpx
from flwr.proto.task_pb2 import Task

from client.node import flower_task
from client.node.deadline import DEADLINE_PASSED
from client.node.logs import log_to_stderr
from client.node.orders import READY, Orders
from knnper.lifeline import die_with_parent

log = logging.getLogger(__name__)

_ORDERS, _REPORT = 0, 1
_LOOK_S = 0.005
_LONGEST_LINE = 65536


def main() -> None:
    """Run until standard input ends or the node does."""
    orders = Orders.from_line(_read_line())
    log_to_stderr(verbose=orders.verbose)
    die_with_parent(orders.parent)
    runner = Runner(orders)
    os.write(_REPORT, READY)
    os.dup2(sys.stderr.fileno(), _REPORT)  # what apps print is for people
    runner.serve()
    os._exit(0)  # without torch's way out, which takes long


class Runner:
    """Forks a process for each task of a node.

    Parameters
    ----------
    orders
        How to reach the node, and what to run.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._tasks = flower_task.TaskSource(
            orders.address, bytes.fromhex(orders.secret)
        )
        self._load: flower_task.LoadApp = flower_task.app_of_the_run
        _preload()
        if not orders.allow_app_code:
            self._load = flower_task.installed_app(orders.app)
        # What is shared with the forks stays shared.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Play tasks, one at a time, until standard input ends."""
        while os.read(_ORDERS, _LONGEST_LINE):
            # Again after each, since a call may have come while one was played.
            while (found := self._next_task()) is not None:
                self._run(*found)

    def _next_task(self) -> tuple[Task, str] | None:
        try:
            return self._tasks.next_task()
        except httpx.HTTPError as error:
            log.warning("the node did not answer its runner: %s", error)
            return None

    def _run(self, task: Task, token: str) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)  # what the app started may hold the other end
        address = self._orders.address

        def note(pulled: bytes) -> None:
            os.write(writing, pulled)  # less than a pipe holds

        child = _fork(lambda: flower_task.play(address, token, self._load, note))
        os.close(writing)
        died_of = why(_wait(child))
        if died_of is not None:
            log.error("the process of a message died: %s", died_of)
            pulled = _rest_of(reading)
            _wait(_fork(lambda: _report(address, token, task, pulled, died_of)))
        os.close(reading)


def why(status: int) -> str | None:
    """Return what a process that ended with ``status`` died of; None if it did not."""
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


def _report(address: str, token: str, task: Task, pulled: bytes, cause: str) -> None:
    reason = f"the client's process died: {cause}"
    flower_task.report_failure(address, token, task, pulled, reason)


def _rest_of(reading: int) -> bytes:
    try:
        return os.read(reading, _LONGEST_LINE)
    except BlockingIOError:
        return b""


def _preload() -> None:
    """Import what nearly every app needs; it starts no thread a fork would lose."""
    import faiss  # noqa: F401
    import torch  # noqa: F401


def _fork(work: Callable[[], None]) -> int:
    """Do ``work`` in a new process and return its id at once."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        _work_and_end(parent, work)
    return child


def _work_and_end(parent: int, work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(_ORDERS)
        work()
        status = 0
    except BaseException:  # nothing may get into the code of the parent
        log.exception("a message could not be played")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int:
    """Return the status with which ``child`` ends; kill it when the node is gone."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if select.select([_ORDERS], [], [], _LOOK_S)[0] and not os.read(
            _ORDERS, _LONGEST_LINE
        ):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os._exit(0)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(_ORDERS, 1)
        if not byte:
            sys.exit("expected orders on standard input; `knnper client` starts this")
        line += byte
    return line


if __name__ == "__main__":
    main()
