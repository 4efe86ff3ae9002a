"""Data and partitions that an experiment's own files bring."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.errors import ConfigError, OwnCodeError
from knnper.experiment_file import load_experiment, results_identity
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.partition.split import fingerprint
from knnper.simulation.workbench import Workbench, open_workbench

CODE = '''
import numpy as np
from knnper import Dataset
from knnper.simulation.partition.schemes import Assignment

def arrays(count: int = 40):
    """Four images of each of ten kinds, two clients."""
    x = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((8, 8), np.uint8)
    y = np.arange(count) % 10
    return {"x": x, "y": y, "clients": np.where(y < 5, "low", "high")}

def by_parity(labels, rng, num_clients: int = 2):
    order = rng.permutation(len(labels))
    return {f"rest {n}": order[labels[order] % num_clients == n]
            for n in range(num_clients)}

def both(dataset):
    half = len(dataset.train) // 2
    return [range(half), range(half, 2 * half)], [[0, 1], [2]]

def twice(labels):
    return [[0, 1], [1, 2]]

def beyond(labels):
    return [[0, len(labels)]]

def nobody(labels):
    return 3

def alike(labels):
    return {"ann": range(10), "bob": range(20, 32), "ann\u00a0": range(10, 20)}

def shared(labels, test_labels):
    everything = np.arange(len(labels))
    tested = np.arange(len(test_labels))
    return Assignment((everything, everything[:2]), (tested, tested[:0]))

class Halves:
    """Written as the partitioners of flwr_datasets are."""

    def __init__(self, num_partitions: int, partition_by: str) -> None:
        self.num_partitions, self.by = num_partitions, partition_by
        self.partition_id_to_natural_id = {0: "even", 1: "odd"}

    def load_partition(self, number: int):
        chosen = [at for at, value in enumerate(self.dataset[self.by][:])
                  if value % self.num_partitions == number]
        return self.dataset.select(chosen)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own_partitions.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("own_partitions", None)
    sys.path[:] = [one for one in sys.path if one != str(tmp_path)]


def document(folder: Path, data: Any, partition: Any) -> Mapping[str, Any]:
    return {
        "name": "own",
        "data": data,
        "partition": partition,
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
        "own_code": str(folder),
    }


def bench_of(folder: Path, partition: Any, data: Any = None) -> Workbench:
    data = data or {"name": "own_partitions:arrays"}
    made = document(folder, data, partition)
    return open_workbench(load_experiment(made, experiment_catalogue()))


def test_a_function_brings_the_data(folder: Path) -> None:
    natural = {"name": "natural", "validation_fraction": 0.0}
    bench = bench_of(folder, natural)
    assert [part.shown for part in bench.partition.clients] == ["high", "low"]
    data = bench.clients.dataset
    assert data.spec.image_shape == (8, 8, 1)
    # A fifth of each client's twenty images, of its five classes about alike.
    assert [len(part.test) for part in bench.partition.clients] == [4, 4]
    more = {"name": "own_partitions:arrays", "count": 60, "test_fraction": 0.5}
    bench = bench_of(folder, natural, more)
    assert (len(bench.clients.dataset.train), len(data.train)) == (30, 32)


def test_a_function_brings_the_partition(folder: Path) -> None:
    own = {"name": "own_partitions:by_parity", "validation_fraction": 0.0}
    bench = bench_of(folder, own)
    even, odd = bench.partition.clients
    assert (even.shown, odd.shown) == ("rest_0", "rest_1")
    labels, tested = (bench.clients.dataset.train.labels, bench.clients.dataset.test)
    assert (labels[even.train] % 2 == 0).all()
    # Tested on what was trained on; nothing is lost.
    assert (tested.labels[odd.test] % 2 == 1).all()
    assert len(even.train) + len(odd.train) == len(labels)
    assert len(even.test) + len(odd.test) == len(tested)
    again = bench_of(folder, own)
    assert fingerprint(again.partition) == fingerprint(bench.partition)
    # Settings of all partitions go together with the function's own.
    three = bench_of(folder, {**own, "num_clients": 3, "unseen_fraction": 0.34})
    assert sum(part.seen for part in three.partition.clients) == 2
    halves = {"name": "own_partitions:both", "validation_fraction": 0.0}
    one, two = bench_of(folder, halves).partition.clients
    assert (one.name, one.shown) == ("0000", "0000")
    assert (one.test.tolist(), two.test.tolist()) == ([0, 1], [2])
    assert two.train.tolist() == list(range(16, 32))


def test_a_partitioner_of_flowers_kind(folder: Path) -> None:
    pytest.importorskip("datasets")
    own = {
        "name": "own_partitions:Halves",
        "num_partitions": 2,
        "partition_by": "label",
        "validation_fraction": 0.0,
    }
    bench = bench_of(folder, own)
    labels = bench.clients.dataset.train.labels
    for part, name in zip(bench.partition.clients, ("even", "odd"), strict=True):
        assert part.shown == name
        expected = np.flatnonzero(labels % 2 == (name == "odd"))
        np.testing.assert_array_equal(part.train, expected)


def test_flowers_own_partitioner(folder: Path) -> None:
    pytest.importorskip("flwr_datasets")
    own = {
        "name": "flwr_datasets.partitioner:DirichletPartitioner",
        "num_partitions": 4,
        "partition_by": "label",
        "alpha": 0.5,
        "min_partition_size": 1,
    }
    parts = bench_of(folder, own, {"name": "digits"}).partition.clients
    assert len(parts) == 4
    places = np.concatenate([np.r_[one.train, one.validation] for one in parts])
    assert len(np.unique(places)) == len(places)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "client 1: found examples that it or another client already has"),
        ("beyond", "client 0: found the places 0 to 32, expected those of 32 examples"),
        ("shared", "found examples that it or another client already has"),
        ("nobody", "nobody returned int, expected a list of places"),
    ],
)
def test_what_is_no_partition(folder: Path, name: str, message: str) -> None:
    with pytest.raises(OwnCodeError, match=message):
        bench_of(folder, {"name": f"own_partitions:{name}"})


@pytest.mark.parametrize(
    ("partitioner", "settings", "message"),
    [
        ("VerticalEven", {"num_partitions": 2}, "the columns label alone; expected"),
        ("Size", {"partition_sizes": [9999]}, "SizePartitioner failed: The sum of"),
        (
            "Dirichlet",
            {"num_partitions": 2, "partition_by": "kind", "alpha": 1.0},
            r"DirichletPartitioner failed: Column \(kind\) not in",
        ),
    ],
)
def test_flowers_partitioners_that_fail(
    folder: Path, partitioner: str, settings: dict[str, Any], message: str
) -> None:
    pytest.importorskip("flwr_datasets")
    own = {"name": f"flwr_datasets.partitioner:{partitioner}Partitioner", **settings}
    with pytest.raises(OwnCodeError, match=message) as caught:
        bench_of(folder, own)
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_clients_that_differ_in_white_space(folder: Path) -> None:
    own = {"name": "own_partitions:alike", "validation_fraction": 0.0}
    ann, bob = bench_of(folder, own).partition.clients
    assert (ann.shown, bob.shown) == ("ann", "bob")
    assert (len(ann.train), len(bob.train)) == (20, 12)


def test_settings_are_the_parameters(folder: Path) -> None:
    own = {"name": "own_partitions:by_parity", "num_client": 3}
    with pytest.raises(ConfigError, match="did you mean 'num_clients'"):
        bench_of(folder, own)
    # What it is made of is part of what a run is.
    own = {"name": "own_partitions:by_parity"}
    identities = set()
    for code in (CODE, CODE.replace("num_clients: int = 2", "num_clients: int = 4")):
        (folder / "own_partitions.py").write_text(code)
        made = document(folder, {"name": "digits"}, own)
        experiment = load_experiment(made, experiment_catalogue())
        identities.add(results_identity(experiment))
    assert len(identities) == 2
