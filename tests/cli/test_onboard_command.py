"""``knnper fed export`` and ``knnper site onboard`` without a network."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.cli.site_memory import describe_gain
from knnper.client.state import Accuracy, Gain, Serving, TunedOn
from knnper.data.digits import DigitsSettings
from knnper.datastore.class_prior import ClassPrior, ClassPriorSettings
from knnper.simulation.trained_model import find_model, trained_model
from tests.cli.conftest import write_client_file


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def exported(tmp_path: Path, run: Path) -> Path:
    result = run_command("fed", "export", run, tmp_path / "model")
    assert result.exit_code == 0, result.output
    return tmp_path / "model"


@pytest.fixture
def client_file(tmp_path: Path) -> Path:
    return write_client_file(tmp_path, more="state: kept")


def test_an_exported_model_is_the_runs(run: Path, exported: Path) -> None:
    model, found = trained_model(run), find_model(exported)
    assert found.fingerprint == model.fingerprint == find_model(run).fingerprint
    assert found.class_names == model.class_names
    assert found.card.method == "FedAvg"


def test_a_site_is_onboarded_without_a_network(
    exported: Path, client_file: Path
) -> None:
    arguments = ("site", "onboard", client_file, "--model", exported, "--no-serve")
    result = run_command(*arguments)

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("site-a: 200 examples (")
    assert lines[1].startswith(f"model {find_model(exported).fingerprint[:12]} of tiny")
    assert lines[2].startswith("assumed to be trained with this site (--took-part)")
    assert lines[3].startswith("λ = ")
    assert "gain" in lines[4]
    assert lines[-1] == f"stored in {client_file.parent / 'kept'}"
    # The server says itself who took part.
    assert run_command("site", "onboard", client_file, "--new").exit_code == 2
    again = run_command(*arguments, "--json", "--new")
    document = json.loads(again.stdout)
    assert document["took_part"] is False
    assert document["client"] == "site-a"
    assert document["model"] == find_model(exported).fingerprint
    splits = ("num_train", "num_validation", "num_test")
    assert sum(document[split] for split in splits) == 200


def test_a_memory_is_brought_up_to_date_by_one_command(
    exported: Path, client_file: Path
) -> None:
    onboarded = ("site", "onboard", client_file, "--model", exported, "--no-serve")
    early = run_command("site", "refresh", client_file)
    assert early.exit_code == 1
    assert "nothing is installed" in early.stderr
    assert run_command(*onboarded).exit_code == 0
    none = run_command("site", "refresh", client_file)
    assert none.exit_code == 0, none.output
    assert none.stdout == "differences between data and memory: none\n"
    served = run_command("site", "onboard", client_file, "--no-serve")
    assert "The data has changed" not in served.stderr

    digits = DigitsSettings().load().train
    inputs, labels = np.array(digits.images[1:250]), np.array(digits.labels[1:250])
    names = [f"{number:05}" for number in range(1, 250)]
    inputs[5] = 0
    file = client_file.parent / "digits.npz"
    np.savez(file, inputs=inputs, labels=labels, names=names)
    only_looked = run_command("site", "refresh", client_file, "--dry-run")
    assert "is up to date" not in only_looked.stdout
    looked = run_command("site", "refresh", client_file, "--dry-run", "--json")
    document = json.loads(looked.stdout)
    assert not document["changed"]
    found = {kind: len(names) for kind, names in document["changes"].items()}
    assert found["vanished"] + found["changed"] > 0
    assert found["new"] > 20
    # `onboard` of a site that has a memory reports the differences, too.
    told = run_command("site", "onboard", client_file, "--no-serve")
    assert told.exit_code == 0, told.output
    assert f"{found['new']} new" in told.stderr
    assert f"knnper site refresh {client_file}" in told.stderr
    done = run_command("site", "refresh", client_file)
    assert done.exit_code == 0, done.output
    assert f"new: {found['new']}\n" in done.stdout
    assert "The memory is up to date.\n" in done.stdout
    assert "λ = " in done.stdout
    assert ("--forget-vanished" in done.stdout) == bool(found["vanished"])
    last = run_command("site", "refresh", client_file, "--forget-vanished", "--json")
    changes = json.loads(last.stdout)["changes"]
    assert {kind: len(names) for kind, names in changes.items()} == {
        "new": 0,
        "changed": 0,
        "vanished": found["vanished"],
        "tested": 0,
    }
    again = run_command("site", "refresh", client_file)
    assert again.stdout == "differences between data and memory: none\n"


def test_refresh_without_differences_changes_nothing(
    exported: Path, client_file: Path
) -> None:
    onboarded = ("site", "onboard", client_file, "--model", exported, "--no-serve")
    assert run_command(*onboarded).exit_code == 0
    refreshed = run_command("site", "refresh", client_file, "--json")
    assert json.loads(refreshed.stdout)["changed"] is False


def test_data_that_cannot_be_read_is_no_reason_not_to_serve(
    exported: Path, client_file: Path
) -> None:
    onboarded = ("site", "onboard", client_file, "--model", exported, "--no-serve")
    assert run_command(*onboarded).exit_code == 0
    (client_file.parent / "digits.npz").unlink()
    served = run_command("site", "onboard", client_file, "--no-serve")
    assert served.exit_code == 0
    assert "The data cannot be compared with the memory: " in served.stderr


ADAPTED = ClassPrior(ClassPriorSettings((1.0,)), 1.5)


def serving(**changes: object) -> Serving:
    values: dict[str, object] = {
        "model": "ab" * 32,
        "knn_weight": 0.7,
        "num_neighbors": 10,
        "kernel": "paper",
        "kernel_scale": 1.0,
        "tuned_on": TunedOn("validation", 24),
        "accuracy": Accuracy(),
        "expected_gain": Gain(0.052, 0.031, 120),
        "num_train": 96,
        "num_validation": 24,
        "num_test": 0,
        "run": "demo",
        "installed": 0.0,
    }
    return Serving(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "+5.2 points, ± 3.1 (95 %), on 120 examples"),
        ({"expected_gain": Gain(None, None, 1)}, "unknown from 1 example"),
        ({"knn_weight": 0.0}, "falls back to the global model: the neighbours showed"),
        (
            {"knn_weight": 0.0, "class_prior": ADAPTED},
            "expected gain over the global model: +5.2 points",
        ),
        (
            {"knn_weight": 0.0, "tuned_on": TunedOn("validation", 9, overruled=True)},
            "falls back to the global model: the neighbours would lower its accuracy",
        ),
    ],
)
def test_the_gain_is_told_as_it_is(changes: dict[str, object], said: str) -> None:
    assert said in describe_gain(serving(**changes))
