import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_jsonable_python

from knnper.data.site_task import SitesSettings, SiteTask, parse_task, sites_settings
from knnper.data.task_file import read_task
from knnper.errors import ConfigError, DataError, Problem
from knnper.settings import parse_settings
from tests.knnper_data.site.site_cases import FEATURES, IMAGES, THREE

SECTION: dict[str, Any] = {
    "image_shape": [4, 4, 3],
    "class_names": ["cat", "dog", "fox"],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": [0.5]}, "found 1 values of mean, expected one for each of the 3"),
        ({"std": [0.5] * 4}, "found 4 values of std"),
        ({"dtype": "token"}, "found 3 values of mean, expected none"),
        ({"class_names": ["a", "b", "a"]}, "class_names holds 'a' more than once"),
        ({"feature_names": ["a", "b"]}, "found 2 feature_names, expected one for each"),
        ({"class_names": ["a"]}, "a list of at least 2"),
        ({"dtype": "int8"}, "expected 'uint8', 'float32', 'token' or 'ids'"),
        ({"dtype": "ids", "mean": [], "std": []}, "expected a vocabulary with 'ids'"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    problems: list[Problem] = []
    assert not parse_settings(SitesSettings, SECTION | changes, "data", problems)
    assert len(problems) == 1
    assert message in str(problems[0])


@pytest.mark.parametrize("task", [IMAGES, FEATURES, THREE])
def test_settings_of_a_task_make_it_again(task: SiteTask) -> None:
    document = to_jsonable_python(sites_settings(task))
    settings = parse_settings(SitesSettings, document, "data", [])
    assert settings is not None
    assert settings.task() == task


def card(task: SiteTask) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(to_jsonable_python(task)))
    return {**plain, "seed": 3}


def test_documents_from_before_features_and_damaged_ones() -> None:
    document = card(IMAGES)
    del document["spec"]["dtype"]
    del document["feature_names"]
    assert parse_task(document, "here") == IMAGES
    with pytest.raises(DataError, match="here names 2 classes of 3"):
        parse_task({**document, "class_names": ["a", "b"]}, "here")
    with pytest.raises(DataError, match=r"here describes no task: spec: .*required"):
        parse_task({"class_names": []}, "here")


def test_the_task_of_a_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"card": card(FEATURES)}))
    assert read_task(tmp_path) == read_task(file) == FEATURES
    for text, message in (("[]", "does not describe a model"), ("{", "is not JSON")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            read_task(tmp_path)


def test_the_task_of_an_experiment(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps({"name": "x", "data": {"name": "sites", **SECTION}}))
    assert read_task(path) == IMAGES
    path.write_text("data: {name: digits}\npartition: {name: iid}\n")
    task = read_task(path)
    assert task.spec.image_shape == (8, 8, 1)
    assert task.class_names == tuple("0123456789")


def test_files_that_describe_no_task(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither an experiment's YAML file nor"):
        read_task(tmp_path / "missing")
    path = tmp_path / "experiment.yaml"
    odd = json.dumps({"data": {"name": "sites", **SECTION, "mean": [1]}})
    for text, message in (
        ("data: {name: digit}", "found data.name 'digit', expected"),
        ("[]", "found data.name None, expected .* or the folder of an exported"),
        (
            f"data: {{name: cifar10, root: {tmp_path}}}",
            "loaded on this machine: .*ask the f",
        ),
        (odd, "found 1 values of mean"),
        ("data: {name: digits, size: 8}", r"data\.size: unknown setting"),
    ):
        path.write_text(text)
        with pytest.raises((DataError, ConfigError), match=message):
            read_task(path)
