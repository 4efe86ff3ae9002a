"""Runs a command that dies with its parent: ``tether.py PARENT_PID COMMAND...``.

A program of its own, which needs nothing but the standard library: the kernel's wish to
be told of a parent's death has to be made in the child, before it becomes the command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command; never returns."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
