"""What the processes of a server weigh, and who they are."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def tree_of(root: int) -> list[int]:
    """Return a process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = (entry / "stat").read_text()
                parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def command_of(process: int) -> str:
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{process}/cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode(errors="replace")
    return ""


def named(root: int, name: str) -> list[int]:
    """Return the processes below ``root`` with ``name`` in their command."""
    return [one for one in tree_of(root) if one != root and name in command_of(one)]


def megabytes(root: int) -> float:
    """Return what a process and all below it hold, shared pages counted once."""
    total = 0
    for process in tree_of(root):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            lines = (line.split() for line in rollup.splitlines())
            total += sum(int(line[1]) for line in lines if line[0] == "Pss:")
    return total * 1024 / 1e6


@contextlib.contextmanager
def growth(root: int) -> Iterator[list[float]]:
    """Give, at the end, by how many megabytes the processes grew at most."""
    before, most, done = megabytes(root), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], megabytes(root) - before)
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
