"""Worker processes that make families side by side."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import SimpleQueue

from knnper.errors import RunError
from knnper.lifeline import die_with_parent
from knnper.process import huge_pages_for_workers
from knnper.simulation.batches.family import Event, Family, SendEvent, make_runs
from knnper.simulation.batches.progress import FamilyEvent

SECONDS_BETWEEN_LOOKS = 1.0
# In a worker process: the queue of its events, set when the process starts.
_queue: "SimpleQueue[FamilyEvent] | None" = None


def run_in_workers(
    families: Sequence[Family], num_workers: int
) -> Iterator[Sequence[FamilyEvent]]:
    """Make the families; yield the workers' new events about once a second.

    Raises RunError if the system kills a worker.
    """
    if not families:
        return
    # Spawned, not forked: this process may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[FamilyEvent] = context.SimpleQueue()
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, context, _begin_worker, (os.getpid(), queue)
    )
    try:
        with huge_pages_for_workers():
            pending = {
                pool.submit(_make_in_worker, make_runs, number, family)
                for number, family in enumerate(families)
            }
        while pending:
            done, pending = concurrent.futures.wait(
                pending, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            events = list[FamilyEvent]()
            while not queue.empty():
                events.append(queue.get())
            yield events
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(
            "a worker process was killed, most likely because the memory was full; use "
            "fewer of them with --workers. The same command continues the batch"
        ) from error
    except BaseException:
        # A family may take minutes: do not wait for it.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int, queue: "SimpleQueue[FamilyEvent]") -> None:
    """Set up a worker process: it ends with its parent and sends events to a queue."""
    global _queue
    die_with_parent(parent)
    _queue = queue


def _make_in_worker(
    make: Callable[[Family, SendEvent], None], number: int, family: Family
) -> None:
    def send(event: Event) -> None:
        if _queue is not None:
            _queue.put((number, event))

    make(family, send)
