"""``knnper partition EXPERIMENT --export FOLDER``."""

from pathlib import Path

import yaml
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


def test_shares_are_files_for_real_clients(tmp_path: Path) -> None:
    experiment, folder = tmp_path / "tiny.yaml", tmp_path / "shares"
    experiment.write_text(yaml.safe_dump(DOCUMENT))
    words = ["partition", str(experiment), "--export", str(folder)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"3 clients' shares and labels.json are in {folder}" in result.stderr
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["0000.npz", "0001.npz", "0002.npz", "labels.json"]
    assert read_task(folder / "labels.json").class_names == tuple("0123456789")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert "is there already; expected a new folder" in again.stderr
    assert sorted(path.name for path in folder.iterdir()) == files
