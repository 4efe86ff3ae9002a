"""Families of runs side by side, in processes that end with this one."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence

from knnper.lifeline import die_with_parent
from simulation.comparison.playing import Order, play


def play_side_by_side(
    families: Sequence[Sequence[Order]], num_workers: int
) -> Iterator[int]:
    """Play the families; yield the number of runs of each that is done.

    Parameters
    ----------
    families
        Runs that share their training; one process plays a family.
    num_workers
        Processes; what they compute does not depend on it.

    Raises
    ------
    KnnPerError
        If a run cannot be made. What runs then is ended, and can be taken up again.
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
        sizes = {pool.submit(play, family): len(family) for family in families}
        for future in concurrent.futures.as_completed(sizes):
            future.result()
            yield sizes[future]
    except BaseException:
        # A family may go on for minutes.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
