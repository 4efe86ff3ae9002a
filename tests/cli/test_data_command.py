"""``knnper site check`` as a user types it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.site import site
from knnper.client.privacy_budget import PrivacyBudget
from knnper.client.settings import read_client

SITES = {
    "name": "sites",
    "image_shape": [2, 2, 1],
    "class_names": ["cat", "dog", "fox"],
    "mean": [0.5],
    "std": [0.25],
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "client.yaml"
    path.write_text(
        "name: site-a\nserver: federation.example.org:8443\ninsecure: true\n"
        "data: {name: npz, path: own.npz}\n"
    )
    put(path, [1, 2, 3, 4])
    return path


def task_of(config: Path, **document: Any) -> Path:
    task = config.with_name("experiment.yaml")
    task.write_text(yaml.safe_dump(document))
    return task


def put(config: Path, values: list[int], **changes: Any) -> None:
    arrays = {
        "inputs": np.array(values, np.uint8)[:, None, None] * np.ones((2, 2), np.uint8),
        "labels": np.array(["cat", "dog", "dog", "cat"]),
        "split": np.array(["train", "train", "validation", "test"]),
        "names": np.array(["a", "b", "c", "d"]),
    }
    np.savez(config.with_name("own.npz"), **(arrays | changes))


def check(config: Path, *arguments: object) -> Result:
    return CliRunner().invoke(site, ["check", str(config), *map(str, arguments)])


def test_sound_data(config: Path) -> None:
    result = check(config, "--task", task_of(config, data=SITES))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "client: site-a"
    assert lines[1] == "inputs: 2x2x1 (height x width x channels) of uint8"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["cat", "1", "0", "1"] in cells
    assert ["fox", "0", "0", "0"] in cells
    assert ["all", "2", "1", "1"] in cells
    assert "values of train: 1 to 2, mean 1.5" in lines
    assert "classes of the federation without an example here: fox" in lines
    assert lines[-1] == "This data can be used. Nothing left this machine."


def test_rows_are_told_by_their_number_of_features(config: Path) -> None:
    put(config, [1, 2, 3, 4], inputs=np.arange(12, dtype=np.float32).reshape(4, 3))
    result = check(config)
    assert result.stdout.splitlines()[1] == "inputs: 3 features of float32"


def test_as_json(config: Path) -> None:
    result = check(config, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["client"], document["sent"]) == ("site-a", False)
    assert document["class_names"] == ["cat", "dog"]
    assert document["splits"]["train"]["class_counts"] == [1, 1]
    put(config, [1, 1, 3, 1])
    result = check(config, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["copies"][0]["shown"] == [["a", "b"]]
    assert len(document["problems"]) == 1


def test_settings_can_be_changed(config: Path) -> None:
    task = task_of(config, data={**SITES, "class_names": ["kitty", "dog"]})
    result = check(config, "--task", task, "--set", "data.label_map={cat: kitty}")
    assert result.exit_code == 0, result.output
    assert "kitty" in result.stdout


def test_an_experiment_has_a_fingerprint_and_may_be_refused(config: Path) -> None:
    document = {
        "name": "a",
        "data": SITES,
        "partition": {"name": "sites"},
        "model": {"name": "mlp", "hidden_sizes": [4]},
        "training": {"batch_size": 1, "local_steps": 1},
        "method": {"name": "fedavg"},
    }
    task = task_of(config, **document)
    result = check(config, "--task", task)
    assert result.exit_code == 0
    assert "found 2 training examples, expected 32" in " ".join(result.stderr.split())
    few = ("--set", "limits.min_examples=2")
    found = json.loads(check(config, "--task", task, "--json", *few).stdout)
    assert "limits.min_examples" in found["refused"][0]
    pinned = ("--set", f"limits.experiment={found['experiment']}")
    task_of(config, **{**document, "training": {"batch_size": 2}})
    changed = check(config, "--task", task, *few, *pinned)
    assert changed.exit_code == 1
    assert f"expected {found['experiment']}" in " ".join(changed.stderr.split())
    (line,) = [one for one in changed.stdout.splitlines() if "fingerprint" in one]
    pinned = ("--set", f"limits.experiment={line.split()[-1]}")
    assert check(config, "--task", task, *few, *pinned).exit_code == 0


def described(config: Path, tmp_path: Path, data: str) -> dict[str, Any]:
    """Return the section that a site writes, once it has been read back."""
    config.write_text(
        "name: site-a\nserver: federation.example.org:8443\ninsecure: true\n"
        f"data: {data}\n"
    )
    result = check(config, "--describe")
    assert result.exit_code == 0, result.output
    file = tmp_path / "described.yaml"
    file.write_text(result.stdout)
    assert "add those of other sites" in result.stderr
    again = check(config, "--task", file)
    assert again.exit_code == 0, again.output
    section: dict[str, Any] = yaml.safe_load(result.stdout)["data"]
    assert section.pop("name") == "sites"
    return section


def test_a_site_describes_itself(config: Path, tmp_path: Path) -> None:
    put(config, [0, 51, 102, 255])
    found = described(config, tmp_path, "{name: npz, path: own.npz}")
    # Of the training inputs 0 and 51, which is a fifth of 255.
    assert found == {
        "image_shape": [2, 2, 1],
        "class_names": ["cat", "dog"],
        "mean": [0.1],
        "std": [0.1],
        "dtype": "uint8",
    }
    rows = "".join(f"{n},1,{'ab'[n % 2]},train\n" for n in range(1, 4))
    (tmp_path / "own.csv").write_text(f"dose,age,kind,part\n{rows}9,9,a,test\n")
    own = "{name: table, path: own.csv, label: kind, split: part}"
    found = described(config, tmp_path, own)
    assert found["mean"] == [2.0, 1.0]
    assert found["std"] == pytest.approx([(2 / 3) ** 0.5, 1.0])
    assert found["feature_names"] == ["dose", "age"]
    (tmp_path / "own.txt").write_text(" ".join(map(str, range(300))))
    found = described(config, tmp_path, "{name: text, path: own.txt}")
    assert (found["mean"], found["std"], found["dtype"]) == ([], [], "token")
    assert len(found["class_names"]) == 81


def test_describe_with_task_is_refused(config: Path) -> None:
    result = check(config, "--describe", "--task", task_of(config, data=SITES))
    assert result.exit_code == 2
    assert "with --task" in result.output


def test_check_shows_epsilon_spent_and_budget(config: Path) -> None:
    text = config.read_text()
    config.write_text(
        f"{text}limits: {{privacy: {{clip_norm: 1, noise_multiplier: 8, "
        "epsilon_year: 2}}\n"
    )
    client = read_client(config)
    assert client.limits.privacy is not None
    budget = PrivacyBudget(client.limits.privacy, client.state, "e" * 64)
    for server_round in (1, 2):
        assert budget.spend(server_round) == []
    # By dp_accounting: 2 and 4 releases with σ = 4 have the ε 1.356 and 1.985.
    year = "epsilon of the year: 1.356 spent at delta 1e-05, of 2"
    document: dict[str, Any] = {
        "name": "x",
        "data": SITES,
        "model": {"name": "mlp"},
        "partition": {"name": "sites"},
        "method": {"name": "knn_per"},
    }
    task = task_of(config, **document, training={"num_rounds": 2})
    of_run = "epsilon of the run: 0 spent at delta 1e-05, without a budget"
    lines = check(config, "--task", task).stdout.splitlines()
    assert {year, of_run} <= set(lines)
    shown = json.loads(check(config, "--task", task, "--json").stdout)["privacy"][
        "year"
    ]
    assert (shown["most"], shown["delta"]) == (2, 1e-5)
    assert shown["epsilon"] == pytest.approx(1.356, abs=1e-3)
    # Three rounds more than the year allows, and a model with BatchNorm.
    few = ("--set", "limits.min_examples=2")
    document["training"] = {"num_rounds": 5, "batch_size": 2}
    refused = check(config, "--task", task_of(config, **document), *few)
    assert refused.exit_code == 1
    assert "more updates: 5" in " ".join(refused.stderr.split())
    document["training"] = {"num_rounds": 1, "batch_size": 2}
    assert check(config, "--task", task_of(config, **document), *few).exit_code == 0
    document["model"] = {"name": "resnet18"}
    refused = check(config, "--task", task_of(config, **document), *few)
    assert refused.exit_code == 1
    assert "BatchNorm" in refused.stderr
