"""Two tiny runs, some images, and a store of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knnper.data.digits import DigitsSettings
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from tests.cli.store_commands import done


def make_run(path: Path, seed: int) -> Path:
    document = {
        "name": "tiny",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tiny_cnn", "embedding_dim": 8},
        "training": {"num_rounds": 1, "batch_size": 32},
        "method": {"name": "fedavg"},
        "run": {"seed": seed, "engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    folder = RunFolder.create(path, experiment)
    simulate(open_workbench(experiment), folder, Observer(), ["test"])
    return folder.path


def write_client_file(folder: Path, *, more: str) -> Path:
    """Write the settings of a client with 200 digits, and the digits beside them.

    ``more`` is a further line of the settings.
    """
    digits = DigitsSettings().load().train
    inputs, labels = np.asarray(digits.images[:200]), np.asarray(digits.labels[:200])
    np.savez(folder / "digits.npz", inputs=inputs, labels=labels)
    path = folder / "client.yaml"
    path.write_text(
        "name: site-a\nserver: nowhere.invalid:1\ninsecure: true\n"
        f"data: {{name: npz, path: digits.npz}}\n{more}\n"
    )
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "first", seed=1)


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "second", seed=2)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with four images of each digit."""
    root = tmp_path_factory.mktemp("images")
    data = DigitsSettings().load().train
    for digit in range(10):
        (root / str(digit)).mkdir()
        chosen = np.flatnonzero(np.asarray(data.labels) == digit)[:4]
        for number, position in enumerate(chosen.tolist()):
            pixels = np.asarray(data.images[position])[:, :, 0]
            Image.fromarray(pixels).save(root / str(digit) / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, run: Path, images: Path) -> Path:
    """Return a store that holds the images."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    done("create", folder, "--model", run)
    done("add", folder, images, "--model", run)
    return folder


@pytest.fixture
def folder(tmp_path: Path, filled: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "store"))
