"""What holds for all tests."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.processes import Commands

ROOT = Path(__file__).resolve().parents[1]

# Before numpy, torch and FAISS are imported: tests run side by side, and what is shared
# among threads waits for those of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# How long an example takes depends on the machine; `deadline` bounds a whole test.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


# Looking for garbage while all is imported takes a quarter of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Where processes are started; all of them end with the test."""
    with Commands(tmp_path / "logs") as started:
        yield started


DEADLINE_S = 30


@pytest.fixture
def deadline() -> Iterator[None]:
    """Fail a test that waits for a pipe, instead of waiting with it."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like site-packages that holds what a wheel leaves there."""
    folder = tmp_path_factory.mktemp("wheel")
    here = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=here)
    place = folder / "site-packages"
    # It makes a wheel, which it then installs.
    install = ["pip", "--no-input", "--quiet", "install", "--no-deps"]
    build = ["--no-build-isolation", "--target", str(place), str(folder / "source")]
    subprocess.run([sys.executable, "-m", *install, *build], check=True)
    return place


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
