"""What holds for all tests."""

import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.processes import Commands


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Where processes are started; all of them end with the test."""
    with Commands(tmp_path / "logs") as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the processes have written."""
    report = yield
    started = getattr(item, "funcargs", {}).get("commands")
    if report.failed and isinstance(started, Commands):
        report.sections.extend(started.last_words())
    return report
