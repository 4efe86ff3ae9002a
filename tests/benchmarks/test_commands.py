"""Each benchmark is a command that explains itself, and `make bench` runs them all."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.dormant_startup_s import write_experiment
from knnper.experiment import read_experiment
from knnper.simulation.workbench import experiment_catalogue

NAMES = [
    "training_vs_bare_torch",
    "task_overhead_ms",
    "round_overhead_s",
    "personalize_vs_bare",
    "server_memory_ratio",
    "dormant_startup_s",
    "store_opening_s",
    "store_adds_per_s",
    "store_query_vs_faiss",
    "index_kinds",
    "index_accuracy_points",
    "real_round_s",
    "service_latency",
    "service_membership",
    "leaf_reading",
    "site_leakage",
]


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_measured(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        module.parser().parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert str(module.__doc__).splitlines()[0] in text
    assert "--repetitions" in text
    assert "--images ROOT" in text
    given = module.parser().parse_args([])
    assert given.repetitions >= 1
    assert given.images == ""


def test_make_runs_all_and_the_page_explains_all() -> None:
    text = Path("Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^BENCHMARKS := (.*)$", text, re.MULTILINE)
    assert found is not None
    assert found.group(1).split() == NAMES
    page = Path("benchmarks/README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"## {name}" in page
        assert f"make bench-{name}" in page


def test_the_dormant_clients_make_a_valid_experiment(tmp_path: Path) -> None:
    file = write_experiment(tmp_path / "images", 10_000, tmp_path)
    settings = read_experiment(file, experiment_catalogue(), [])
    assert settings.training.participation * 10_000 == pytest.approx(10)
    assert yaml.safe_load(file.read_text("utf-8"))["method"]["name"] == "fedavg"
