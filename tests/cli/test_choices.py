"""``knnper list``: lines that fit a terminal, and one choice with its settings."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.cli.choices import Choosable, entries_of
from knnper.experiment_file import load_experiment
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.experiments import shipped_experiments


def listed(*words: str) -> Result:
    return CliRunner().invoke(app, ["list", *words])


@pytest.mark.parametrize("what", Choosable)
def test_each_choice_is_a_line_of_a_terminal(
    what: Choosable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", "80")
    lines = listed(what).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [entry.name for entry in entries_of(what)]
    for name, line in zip(names, lines, strict=False):
        assert line.startswith(f"{name} ")
        assert len(line.split()) > len(name.split())
    # Where no terminal is, nothing is cut.
    monkeypatch.delenv("FORCE_COLOR")
    whole = listed(what).stdout
    assert all(entry.summary in whole for entry in entries_of(what))


@pytest.mark.parametrize("what", [part for part in Choosable if part != "experiments"])
def test_each_choice_is_shown_with_its_settings(what: Choosable) -> None:
    catalogue = experiment_catalogue()
    types = {
        Choosable.METHODS: catalogue.method,
        Choosable.PERSONALIZATIONS: catalogue.personalization,
        Choosable.DATA: catalogue.data,
        Choosable.PARTITIONS: catalogue.partition,
        Choosable.MODELS: catalogue.model,
        Choosable.OPTIMIZERS: catalogue.optimizer,
        Choosable.COMPRESSIONS: catalogue.compression,
    }
    for entry in entries_of(what):
        if what in types:
            assert entry.settings_type is types[what][entry.name]
    (entry, *_) = entries_of(what)
    done = listed(what, entry.name)
    assert done.exit_code == 0, done.output
    assert " ".join(entry.summary.split()) in " ".join(done.stdout.split())


def test_settings_have_type_range_default_and_meaning() -> None:
    text = " ".join(listed("methods", "fedprox").stdout.split())
    assert "An experiment chooses it by method: {name: fedprox}" in text
    assert "prox_weight: number ≥ 0; default 0.1 μ; 0.001 to 1 in the paper" in text
    assert "source Li et al. 2020, Algorithm 2" in text
    # A personalisation is found there, too, in its own section.
    text = " ".join(listed("methods", "knn").stdout.split())
    assert "personalization: {name: knn}" in text
    assert "tuning.min_validation: whole number ≥ 1; default 50" in text
    text = listed("data", "image_folder").stdout
    assert "root: text; required" in text
    assert "There is nothing to set" in listed("methods", "fedavg").stdout


def test_sections_have_the_keys_of_nested_settings() -> None:
    text = " ".join(listed("sections", "privacy").stdout.split())
    assert "clip_norm: number > 0; required" in text
    assert "adaptive: true or false; default false" in text
    text = listed("sections", "client.yaml").stdout
    assert "service.privacy.threshold: number > 0, ≤ 1; required" in text
    assert "An experiment chooses it" not in text


def test_partition_is_not_described_by_its_catalogue() -> None:
    text = listed("partitions", "dirichlet").stdout
    assert "spread over the clients by a Dirichlet draw" in text
    assert "catalogue" not in text


def test_shown_defaults_can_be_set() -> None:
    found = json.loads(listed("partitions", "dirichlet", "--json").stdout)
    defaults = {
        setting["key"]: setting["default"]
        for setting in found["settings"]
        if setting["default"] is not None
    }
    assert defaults["alpha"] == "0.3"
    document = {
        "name": "shown",
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "num_clients": 4},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }
    changes = [f"partition.{key}={value}" for key, value in defaults.items()]
    load_experiment(document, experiment_catalogue(), changes)


def test_a_shipped_experiment_is_shown_as_its_file() -> None:
    path = shipped_experiments()["demo"]
    assert listed("experiments", "demo").stdout == path.read_text(encoding="utf-8")
    document = json.loads(listed("experiments", "demo", "--json").stdout)
    assert document["name"] == "demo"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["methods", "fedprx"], "did you mean 'fedprox'?"),
        (["models", "tiny-cnn"], "did you mean 'tiny_cnn'?"),
        (["experiments", "demoo"], "did you mean 'demo'?"),
        (["modles"], "is not one of"),
    ],
)
def test_a_wrong_name_gives_the_nearest(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    done = listed(*words)
    assert done.exit_code == 2
    assert expected in " ".join(done.stderr.replace("│", " ").split())
