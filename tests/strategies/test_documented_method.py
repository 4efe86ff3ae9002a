"""What the page docs/adding_a_method.md names is there."""

import re
from pathlib import Path

import yaml

from knnper.experiment_file import load_experiment
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies import fedprox
from tests.strategies.method_checks import document

ROOT = Path(__file__).resolve().parents[2]


def page() -> str:
    return (ROOT / "docs/adding_a_method.md").read_text(encoding="utf-8")


def test_its_choice_can_be_made() -> None:
    (choice,) = re.findall(r"`method: (\{name: fedprox.*?\})`", page())
    chosen = load_experiment(
        document(yaml.safe_load(choice)), experiment_catalogue()
    ).method
    assert chosen.name == "fedprox"
    assert chosen.settings == fedprox.FedProxSettings(prox_weight=0.1)


def test_what_is_named_exists() -> None:
    """Every name in code on how to write a method is one that the code uses."""
    named = re.findall(r"`([a-z_]+)=?[`(]", page().split("## Into the catalogue")[0])
    sources = (ROOT / "strategies").rglob("*.py")
    words = re.findall(r"\w+", " ".join(path.read_text("utf-8") for path in sources))
    assert set(named) <= set(words)
    assert named
