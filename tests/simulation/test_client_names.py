"""Clients keep the names that the data gives them; nothing random depends on these."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper import Run, RunError
from knnper.client.runtime import ClientRuntime
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.label_counts import PARTITION
from knnper.simulation.partition.export import export_shares
from knnper.simulation.partition.split import titles_of
from knnper.simulation.workbench import open_workbench


def put_images(root: Path, users: tuple[str, ...]) -> None:
    generator = np.random.default_rng(3)
    for split, count in (("train", 6), ("test", 3)):
        for user in users:
            for name in ("cat", "dog"):
                folder = root / split / user / name
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")


def run(root: Path, folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    document = {
        "name": "names",
        "data": {"name": "image_folder", "root": str(root), "channels": 1},
        "partition": {"name": "natural", "unseen_fraction": 0.3},
        "model": {"name": "tiny_cnn"},
        "training": {"num_rounds": 2, "batch_size": 4},
        "method": {"name": "knn_per"},
        "run": {"engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    bench = open_workbench(experiment)
    results = simulate(
        bench, RunFolder.create(folder, experiment), Observer(), ["knnper"]
    )
    rows = [*csv.DictReader((folder / "clients.csv").read_text().splitlines())]
    counts = json.loads((folder / PARTITION).read_text())
    assert [client["client"] for client in counts["clients"]] == [
        part.shown for part in bench.partition.clients
    ]
    return rows, dict(results)


def test_a_run_shows_the_names_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the order of the names' characters, as files are listed.
    put_images(tmp_path / "one", ("ward 7", "zoë", "Ärztin"))
    put_images(tmp_path / "two", ("a", "b", "c"))
    named, results = run(tmp_path / "one", tmp_path / "run1")
    finished = Run(tmp_path / "run1")
    assert len(finished.data("ward_7").train) == 10
    inputs = finished.test("Ärztin").images
    assert finished.predictor("Ärztin")(inputs).shape == (len(inputs), 2)
    with pytest.raises(RunError, match=r"did you mean 'ward_7'\?"):
        finished.predictor("ward 7")
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise RunError("on purpose")

        patch.setattr(ClientRuntime, "personalize", fail)
        with pytest.raises(RunError, match="client Ärztin could not personalise: on"):
            finished.predictor("Ärztin")
    plain, same = run(tmp_path / "two", tmp_path / "run2")
    assert [row.pop("client") for row in named] == ["ward_7", "zoë", "Ärztin"]
    assert [row.pop("client") for row in plain] == ["a", "b", "c"]
    assert named == plain
    hashes = [
        run_results["training"]["state_sha256"] for run_results in (results, same)
    ]
    assert hashes[0] == hashes[1]


def test_titles_fit_for_files() -> None:
    titles = titles_of(["a/b", "a b", "A b", "", "..", "東京", "x" * 99, "f0_1"])
    assert titles[:2] == ("a_b", "a_b-2")
    assert titles[2:] == ("A_b-3", "client", "client-2", "東京", "x" * 60, "f0_1")


def test_shares_are_exported_by_name(tmp_path: Path) -> None:
    put_images(tmp_path / "own", ("adam", "zoe"))
    document = {
        "name": "names",
        "data": {"name": "image_folder", "root": str(tmp_path / "own")},
        "partition": {"name": "natural"},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }
    bench = open_workbench(load_experiment(document, experiment_catalogue()))
    files = export_shares(bench.clients.dataset, bench.partition, tmp_path / "shares")
    assert files == ["adam.npz", "zoe.npz"]
    agreed = json.loads((tmp_path / "shares" / "labels.json").read_text())
    assert list(agreed["clients"]) == ["adam", "zoe"]
    for file in files:
        assert (tmp_path / "shares" / file).is_file()
