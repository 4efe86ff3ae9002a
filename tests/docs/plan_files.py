"""Shipped experiments, comparisons and figures, each read once in a test process."""

from functools import cache
from pathlib import Path

from papers.files import File, read_file

ROOT = Path(__file__).resolve().parents[2]


def read_plan_file(path: Path) -> File:
    """Read a shipped file; later calls return the same object."""
    return _read(path.resolve().relative_to(ROOT))


# A comparison has thousands of points, so planning one takes up to a second.
_read = cache(read_file)
