"""Services that the tests of requests ask."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client.service.small_service import LIMITS, SmallServed, asking, small_served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SmallServed:
    return small_served(tmp_path_factory.mktemp("served") / "store")


@pytest.fixture(scope="module")
def client(served: SmallServed) -> Iterator[httpx.Client]:
    with asking(served, limits=LIMITS) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[httpx.Client, SmallServed]]:
    """Give a service that the test may change."""
    served = small_served(tmp_path / "store")
    with asking(served) as client:
        yield client, served
