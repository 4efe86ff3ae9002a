"""The runner, seen from the node: started, woken, started again, ended."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

from client.node.orders import READY, Orders
from knnper.config.errors import RunError

log = logging.getLogger(__name__)

# Without the working directory on its path: what lies there is no part of the client.
_COMMAND = (sys.executable, "-P", "-m", "client.node.runner")
_STOP_S = 1.0


class RunnerProcess:
    """A runner.

    Parameters
    ----------
    orders
        What it is to do.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._process = self._start()
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait until torch and the app are loaded.

        Raises
        ------
        RunError
            If the runner ended instead.
        """
        if self._is_ready:
            return
        output = self._process.stdout
        assert output is not None
        if output.readline() != READY:
            self._process.wait()
            raise RunError(
                f"the runner ended with exit status {self._process.returncode} before "
                f"it had loaded {self._orders.app}; what it wrote is above"
            )
        self._is_ready = True

    def wake(self) -> None:
        """Tell the runner that there may be a task.

        One that died is replaced; the message it had is answered by Flower.

        Raises
        ------
        RunError
            If the runner cannot be started again.
        """
        if self._process.poll() is not None:
            status = self._process.returncode
            log.error("the runner ended with exit status %d; it is restarted", status)
            self.stop()
            self._process, self._is_ready = self._start(), False
            self.wait_until_ready()
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._stdin(), b"\n")

    def stop(self) -> None:
        """End the runner and whatever it runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the node, which ends the runner
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._orders.as_line())
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _stdin(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()


@contextlib.contextmanager
def started(orders: Orders) -> Iterator[RunnerProcess]:
    """Give a runner that ends with the block."""
    runner = RunnerProcess(orders)
    try:
        yield runner
    finally:
        runner.stop()
