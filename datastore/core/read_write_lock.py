"""Many readers or one writer, among the threads of a process."""

import threading
from collections.abc import Callable
from types import TracebackType


class ReadWriteLock:
    """Lets any number of readers in together, and a writer alone.

    A writer that waits keeps new readers out, so that a busy service's searches do not
    hold it off for ever.

    Attributes
    ----------
    reading, writing
        Contexts for ``with`` blocks, which must not be nested.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._num_readers = 0
        self._num_waiting = 0
        self._is_written = False
        # Made once: a query that takes a millisecond would notice a generator.
        self.reading = _Turn(self._enter_reader, self._leave_reader)
        self.writing = _Turn(self._enter_writer, self._leave_writer)

    def _enter_reader(self) -> None:
        with self._condition:
            while self._is_written or self._num_waiting:
                self._condition.wait()
            self._num_readers += 1

    def _leave_reader(self) -> None:
        with self._condition:
            self._num_readers -= 1
            if self._num_waiting and not self._num_readers:
                self._condition.notify_all()

    def _enter_writer(self) -> None:
        with self._condition:
            self._num_waiting += 1
            try:
                while self._is_written or self._num_readers:
                    self._condition.wait()
            finally:
                # Also when it is interrupted: readers would wait for it for ever.
                self._num_waiting -= 1
                self._condition.notify_all()
            self._is_written = True

    def _leave_writer(self) -> None:
        with self._condition:
            self._is_written = False
            self._condition.notify_all()


class _Turn:
    """Enters and leaves by two functions."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
