"""The installed package: one import name, beside whatever files a user has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ("client", "server", "simulation", "strategies", "datastore")
IMPORT_ALL = """
import importlib, pkgutil, sys
import knnper
for module in pkgutil.walk_packages(knnper.__path__, "knnper."):
    importlib.import_module(module.name)
assert knnper.__file__.startswith(sys.argv[1]), knnper.__file__
"""


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """Return a folder whose own modules have the names of our rooms."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text("raise ImportError('the user owns this')")
    return tmp_path


def python(installed: Path, folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_wheel_installs_only_the_package_knnper(installed: Path) -> None:
    found = {entry.name for entry in installed.iterdir()}
    own = {name for name in found if not name.endswith(".dist-info")}
    assert own - {"bin", "__pycache__"} == {"knnper"}
    for room in FOREIGN:
        assert (installed / "knnper" / room / "__init__.py").is_file()
    for files in (
        "knnper/simulation/experiments/*.yaml",
        "knnper/cli/new_experiment/*",
        "knnper/cli/new_comparison/*",
    ):
        expected = {one.name for one in ROOT.glob(files) if one.is_file()}
        assert {one.name for one in installed.glob(files)} - {"__pycache__"} == expected


def test_every_module_is_imported_beside_a_users_own(
    installed: Path, users_folder: Path
) -> None:
    python(installed, users_folder, "-c", IMPORT_ALL, str(installed))


@pytest.mark.slow
def test_a_new_experiment_and_the_demo_run_beside_a_users_own(
    installed: Path, users_folder: Path
) -> None:
    def knnper(*arguments: str) -> None:
        command = "import sys; from knnper.cli.app import main; sys.exit(main())"
        python(installed, users_folder, "-c", command, *arguments)

    knnper("init", "mine")
    for name in ("mine/experiment.yaml", "demo"):
        knnper("simulate", name, "--set", "training.num_rounds=1")
    results = {path.parent.name for path in users_folder.glob("runs/*/results.json")}
    assert results == {"mine", "demo"}
