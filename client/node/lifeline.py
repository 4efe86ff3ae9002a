"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, in whatever way.

    Elsewhere than on Linux it does nothing but look once whether the parent lives.

    Parameters
    ----------
    parent
        Process id of the parent. It may have ended before this was called; then this
        process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
