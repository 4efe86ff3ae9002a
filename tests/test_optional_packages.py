"""What works without the packages of the extras, and the errors where one is needed."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from tests.fresh_process import run_fresh

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPMENT = {"test", "docs", "dev"}
# Only the packages that no dependency of a base install requires.
PACKAGES = (
    "prometheus_client",
    "matplotlib",
    "tensorboard",
    "pyarrow",
    "ijson",
    "timm",
    "peft",
    "transformers",
    "datasets",
    "flwr_datasets",
)
SWEEP = """
name: rates
base:
  data: {name: digits}
  partition: {name: dirichlet, num_clients: 4}
  model: {name: tiny_cnn}
  method: {name: fedavg}
seeds: [0]
x: training.learning_rate
grid: {training.learning_rate: [0.1, 0.2]}
"""
BLOCKED = f"import sys\nfor name in {PACKAGES}: sys.modules[name] = None\n"
SIMULATE = """
from knnper import simulate
run = simulate(
    "demo",
    output={folder!r},
    progress=False,
    partition={{"name": "dirichlet", "num_clients": 5, "unseen_fraction": 0.2}},
    training__num_rounds=1,
    training__participation=0.5,
)
print(run)
"""


@pytest.mark.integration
@pytest.mark.ray
def test_base_install_runs_a_simulation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run_fresh(BLOCKED + SIMULATE.format(folder=str(folder)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "results.json").is_file()
    assert not (folder / "tensorboard").exists()


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("site serve client.yaml", "prometheus_client", "service"),
        ("site onboard client.yaml", "prometheus_client", "service"),
        ("report run", "matplotlib", "report"),
        ("partition demo --plot plot.svg", "matplotlib", "report"),
        ("sweep sweep.yaml", "matplotlib", "report"),
    ],
)
def test_command_names_the_missing_package_and_its_extra(
    command: str,
    package: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "client.yaml").write_text("name: a\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 1
    message = " ".join(done.stderr.split())
    assert f"the package {package.replace('_', '-')}, which is not" in message
    assert f"pip install 'knnper[{extra}]'" in message


def test_all_has_every_extra_of_users() -> None:
    named = [
        name
        for requirement in EXTRAS["all"]
        for name in re.fullmatch(r"knnper\[(.*)\]", requirement)[1].split(",")  # type: ignore[index]
    ]
    assert sorted(named) == sorted(EXTRAS.keys() - DEVELOPMENT - {"all"})
    assert "knnper[all]" in EXTRAS["test"]
    assert any(line.startswith("knnper[test,") for line in EXTRAS["dev"])
