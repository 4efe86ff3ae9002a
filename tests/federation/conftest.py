import functools
from pathlib import Path

import pytest

from tests.federation.small_federation import Example, Found, found_federation
from tests.processes import Commands


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Digits split over three seen clients and an unseen one."""
    made = Example(tmp_path_factory.mktemp("example"))
    made.make()
    return made


@pytest.fixture
def found(tmp_path: Path, example: Example, commands: Commands) -> Found:
    """Makes a federation in the test's folder; see `found_federation`."""
    return functools.partial(found_federation, tmp_path / "fed", example, commands)
