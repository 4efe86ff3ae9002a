"""Flower's grid over HTTP, as the ServerApp of a federation uses it.

Knows a private part of Flower, whose version is pinned for it; a test says when it is
no longer there.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

FIRST_RETRY_S = 0.05


@contextlib.contextmanager
def quick_pulls() -> Iterator[None]:
    """Ask sooner for arrays of a reply that are still on their way.

    A reply is seen before all of its arrays have arrived. Flower then waits a second,
    which can be longer than the round.
    """
    pull = functools.partial(pull_objects, initial_backoff=FIRST_RETRY_S)
    with mock.patch.object(http_grid, "pull_objects", pull):
        yield
