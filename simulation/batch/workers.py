"""Families of runs side by side, in processes that end with this one."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence

from knnper.config.errors import RunError
from knnper.lifeline import die_with_parent
from simulation.batch.playing import Family, play

SECONDS_BETWEEN_LOOKS = 1.0


def play_side_by_side(families: Sequence[Family], num_workers: int) -> Iterator[int]:
    """Play the families; yield the number of runs of each that is done.

    While none is, yield 0 about once a second: the caller may look how they get on.

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
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )
    try:
        sizes = {pool.submit(play, family): len(family.orders) for family in families}
        while sizes:
            done, _ = concurrent.futures.wait(
                sizes, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            yield sum(sizes.pop(future) for future in done)
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
