"""Families of runs side by side, in processes that end with this one."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence

from knnper.config.errors import RunError
from simulation.batch.events import Told, begin_worker, new_queue, play_telling, told_by
from simulation.batch.playing import Family, play

SECONDS_BETWEEN_LOOKS = 1.0


def play_side_by_side(
    families: Sequence[Family], num_workers: int
) -> Iterator[Sequence[Told]]:
    """Play the families; yield about once a second what the workers told since.

    Parameters
    ----------
    families
        One process plays a family.
    num_workers
        Processes; what they compute does not depend on it.

    Raises
    ------
    KnnPerError
        If a run cannot be made, or the system ends a process. What runs then is ended,
        and can be taken up again.
    """
    if not families:
        return
    queue = new_queue()
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=begin_worker,
        initargs=(os.getpid(), queue),
    )
    try:
        left = {
            pool.submit(play_telling, play, number, family)
            for number, family in enumerate(families)
        }
        while left:
            done, left = concurrent.futures.wait(
                left, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            yield list(told_by(queue))
    except concurrent.futures.BrokenExecutor as error:
        raise RunError(
            "a worker process was killed, most likely because the memory was full; use "
            "fewer of them with --workers. The same command goes on with what is done"
        ) from error
    except BaseException:
        # A family may go on for minutes.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
