"""Worker processes of one thread each, without Ray."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import faiss
import torch

Share = TypeVar("Share")
R = TypeVar("R")


class Processes(contextlib.ExitStack):
    """Fresh processes that each work on their shares.

    They have the environment of plain torch; Ray's workers have another one, see
    `knnper.simulation.flower_nodes`.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        # One pool per process fixes the assignment of shares, so that all processes
        # are warm after their first share.
        context = multiprocessing.get_context("spawn")
        self._pools = [
            self.enter_context(
                ProcessPoolExecutor(1, context, initializer=_use_one_thread)
            )
            for _ in range(count)
        ]
        for pool in self._pools:
            pool.submit(os.getpid).result()

    def run(self, function: Callable[[Share], R], shares: Sequence[Share]) -> list[R]:
        """Apply ``function`` to each process's share."""
        futures = [
            pool.submit(function, share)
            for pool, share in zip(self._pools, shares, strict=True)
        ]
        return [future.result() for future in futures]


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
