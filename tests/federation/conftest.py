import functools
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.federation.running_commands import Commands
from tests.federation.small_federation import Example, Found, found_federation


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Digits split over three seen clients and an unseen one."""
    made = Example(tmp_path_factory.mktemp("example"))
    made.make()
    return made


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Where processes are started; all of them end with the test."""
    with Commands(tmp_path / "logs") as started:
        yield started


@pytest.fixture
def found(tmp_path: Path, example: Example, commands: Commands) -> Found:
    """Makes a federation in the test's folder; see `found_federation`."""
    return functools.partial(found_federation, tmp_path / "fed", example, commands)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the processes have written."""
    report = yield
    started = item.funcargs.get("commands")
    if report.failed and isinstance(started, Commands):
        report.sections.extend(started.last_words())
    return report
