"""Processes that do not outlive the one that started them.

Also a program of its own, ``lifeline.py PARENT_PID COMMAND...``. It becomes a command
that dies with its parent: the kernel has to be asked in the child, before that is the
command. As such it is run by path, without the packages around it, and so needs nothing
but the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Become the command; never returns."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
