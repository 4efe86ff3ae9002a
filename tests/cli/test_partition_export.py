"""``knnper partition EXPERIMENT --export FOLDER``."""

from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from knnper.data.site import read_task
from knnper_cli.app import app

DOCUMENT = {
    "name": "tiny",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 3},
    "model": {"name": "tiny_cnn"},
    "method": {"name": "fedavg"},
}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def export(experiment: Path, folder: Path) -> Result:
    words = ["partition", str(experiment), "--export", str(folder)]
    return CliRunner().invoke(app, words)


def test_shares_are_files_for_real_clients(experiment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shares"
    result = export(experiment, folder)
    assert result.exit_code == 0, result.output
    assert f"3 clients' shares and labels.json are in {folder}" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        "0000.npz",
        "0001.npz",
        "0002.npz",
        "labels.json",
    ]
    assert read_task(folder / "labels.json").class_names == tuple("0123456789")


def test_a_folder_that_is_there_is_left_alone(experiment: Path, tmp_path: Path) -> None:
    result = export(experiment, tmp_path)
    assert result.exit_code == 1
    assert "is there already; expected a new folder" in result.stderr
    assert list(tmp_path.iterdir()) == [experiment]
