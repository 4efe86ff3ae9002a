"""The Python path of tests that import users' code."""

import contextlib
import sys
from collections.abc import Iterator

from knnper.own import _search_first


@contextlib.contextmanager
def clean_import_path(*names: str) -> Iterator[None]:
    """Run without the folder of an earlier experiment; forget what was imported.

    Modules called ``names`` are forgotten afterwards, unless they were known before.
    """
    _search_first(None)  # of a test before that ran an experiment in this process
    path, known = list(sys.path), set(sys.modules)
    yield
    _search_first(None)
    sys.path[:] = path
    for name in {*names} - known:
        sys.modules.pop(name, None)
