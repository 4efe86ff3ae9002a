import dataclasses
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, MultiStepSchedule
from knnper.experiment_file import Catalogue, read_experiment
from knnper.settings import nearest
from tests.config.conftest import Basis


def test_numbers_lists_and_schedules(basis: Basis) -> None:
    basis.document["training"] = {
        "learning_rate": 1,
        "schedule": {"name": "multi_step", "milestones": [100, 150]},
    }
    basis.document["personalization"] = {"knn_weights": [0, 0.5, 1], "capacity": 7}
    experiment = basis.load()
    assert experiment.training.learning_rate == 1.0
    assert experiment.training.schedule == MultiStepSchedule((100, 150))
    memory = dataclasses.asdict(experiment.personalization.settings)
    assert (memory["knn_weights"], memory["capacity"]) == ((0.0, 0.5, 1.0), 7)


def test_all_problems_are_reported_at_once(basis: Basis) -> None:
    del basis.document["model"]
    basis.document["trainin"] = {}
    basis.document["data"] = {"name": "cifar1"}
    basis.document["partition"] = {"name": "dirichlet", "alpha": 0, "clients": 3}
    basis.document["run"] = {"engine": "serail", "seed": True}
    assert basis.problems() == {
        "trainin": "unknown section; did you mean 'training'? known: data, method, "
        "model, name, own_code, partition, personalization, privacy, run, training",
        "data.name": "unknown name \"cifar1\"; did you mean 'cifar10'? "
        "known: cifar10, digits",
        "partition.alpha": "found 0, expected a number greater than 0",
        "partition.clients": "unknown setting; did you mean 'num_clients'? "
        "known: alpha, num_clients, unseen_fraction",
        "model": "found nothing, expected a mapping such as {name: tiny_cnn}",
        "run.engine": "found \"serail\", expected 'flower' or 'serial'; "
        "did you mean 'serial'?",
        "run.seed": "found true, expected a whole number",
    }


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("adamw", ["SGD", "Adam", "AdamW", "Adamax"], "did you mean 'AdamW'?"),
        ("DIGITS", ["cifar10", "digits"], "did you mean 'digits'?"),
        ("Straße", ["STRASSE", "Strand"], "did you mean 'STRASSE'?"),
        ("sgd", ["mean", "SGD"], "did you mean 'SGD'?"),
        ("xyz", ["SGD"], ""),
    ],
)
def test_nearest_ignores_capitals(name: str, known: list[str], expected: str) -> None:
    assert nearest(name, known) == expected


INF = float("inf")
STEPS = {"name": "multi_step", "milestones": [5]}
CLUSTER = {"ray_address": "10.0.0.1:6379"}


def schedule(value: object, place: str, message: str) -> tuple[str, Any, str, str]:
    return "training", {"schedule": value}, f"training.schedule{place}", message


def memory(place: str, value: object, message: str) -> tuple[str, Any, str, str]:
    setting = place.partition(".")[0]
    return "personalization", {setting: value}, f"personalization.{place}", message


@pytest.mark.parametrize(
    ("section", "value", "place", "message"),
    [
        ("name", "", "name", 'found ""'),
        ("name", 7, "name", "found 7"),
        ("data", "digits", "data", 'found "digits", expected a mapping such as'),
        ("data", {}, "data.name", "found no name; known: cifar10, digits"),
        ("data", {"name": 3}, "data.name", "unknown name 3; known"),
        ("model", {"name": "tiny_cnn", "x": 1}, "model.x", "none are known here"),
        ("partition", {"name": "dirichlet"}, "partition.alpha", "found nothing"),
        ("training", None, "training", "expected a mapping; write {} for"),
        ("training", [1], "training", "found [1], expected a mapping"),
        ("training", {"num_rounds": 2.5}, "training.num_rounds", "a whole number"),
        ("training", {"num_rounds": 0}, "training.num_rounds", "at least 1"),
        ("training", {"momentum": 1}, "training.momentum", "less than 1"),
        ("training", {"learning_rate": "x"}, "training.learning_rate", "a number"),
        ("training", {"learning_rate": INF}, "training.learning_rate", "a finite"),
        schedule({"name": "multistep"}, "", "did you mean 'multi_step'? known: const"),
        schedule({}, "", "found no key 'name'"),
        schedule(3, "", "expected a mapping"),
        schedule({"name": "multi_step"}, ".milestones", "found nothing"),
        schedule({**STEPS, "milestones": [3, 0]}, ".milestones.1", "at least 1"),
        schedule({**STEPS, "factr": 1}, ".factr", "did you mean 'factor'? known:"),
        schedule({**STEPS, "milestones": [5, 5]}, ".milestones", "increasing rounds"),
        (
            "training",
            {"local_epochs": 2, "local_steps": 3},
            "training.local_steps",
            "found local_epochs = 2 and local_steps = 3, expected one of the two",
        ),
        memory(
            "capacity", "al", "a whole number, or found \"al\", expected 'all'; did"
        ),
        memory("note", 3, "expected text"),
        memory("knn_weights.1", [0, 2], "found 2, expected a number of at most 1"),
        memory("approximate", 1, "expected true or false"),
        ("run", CLUSTER | {"engine": "serial"}, "run.ray_address", "expected null"),
        ("run", CLUSTER | {"num_workers": 4}, "run.num_workers", "expected null"),
        (
            "personalization",
            {"approximate": True, "kernel": "squared"},
            "personalization",
            "approximate search knows the kernel 'paper' only",
        ),
    ],
)
def test_one_problem(
    basis: Basis, section: str, value: object, place: str, message: str
) -> None:
    basis.document[section] = value
    problems = basis.problems()
    assert list(problems) == [place]
    assert message in problems[place]


def test_long_values_are_cut(basis: Basis) -> None:
    basis.document["training"] = {"num_rounds": "9" * 1000}
    message = basis.problems()["training.num_rounds"]
    assert len(message) < 120


def test_the_check_of_the_catalogue_sees_a_valid_experiment(basis: Basis) -> None:
    def check(experiment: Experiment) -> list[Problem]:
        return [Problem("method", experiment.name)]

    basis.catalogue = dataclasses.replace(basis.catalogue, check=check)
    assert basis.problems() == {"method": "demo"}
    basis.document["run"] = 3
    assert list(basis.problems()) == ["run"]


def test_overrides_win_and_their_problems_join_the_others(basis: Basis) -> None:
    overrides = ["training.num_rounds=7", "training.num_rounds=8", "data.name=cifar10"]
    experiment = basis.load(*overrides)
    assert experiment.training.num_rounds == 8
    assert experiment.data.name == "cifar10"
    assert basis.document["data"] == {"name": "digits"}
    problems = basis.problems("training", "run.sed=1")
    assert list(problems) == ["override", "run.sed"]
    assert "did you mean 'seed'?" in problems["run.sed"]


def test_another_method_or_model_asks_to_replace_the_section(basis: Basis) -> None:
    basis.document["personalization"] = {"kernel": "squared"}
    for override in ("method.name=fedavg", "method={name: fedavg}"):
        problems = basis.problems(override)
        assert "--set 'personalization={}'" in problems["personalization.kernel"]
    replaced = ("method={name: fedavg}", "personalization={}")
    assert basis.load(*replaced).method.name == "fedavg"
    basis.document["model"]["width"] = 3
    problems = basis.problems("model.name=tiny_cnn")
    assert "--set 'model={name: tiny_cnn}'" in problems["model.width"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"e\.yaml: there is no such file"),
        (b"", r"the file is empty; expected the keys name, data, partition"),
        (b"# nothing", r"the file is empty"),
        (b"- 1", r"document: found \[1\], expected the keys name"),
        (b"\xff\xfe\x00", r"expected a readable text file in UTF-8"),
        (b"name: [", r"line 1, column 8: invalid YAML"),
    ],
)
def test_unreadable_files(
    tmp_path: Path, catalogue: Catalogue, content: bytes | None, message: str
) -> None:
    path = tmp_path / "e.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_experiment(path, catalogue)
