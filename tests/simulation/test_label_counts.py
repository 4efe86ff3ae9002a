import json
from pathlib import Path

import numpy as np
import pytest

from knnper.errors import RunError
from knnper.loading import load_experiment
from knnper.simulation.workbench import (
    Workbench,
    count_labels,
    experiment_catalogue,
    keep_label_counts,
    open_workbench,
    read_label_counts,
)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    document = {
        "name": "counts",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 5,
            "alpha": 0.3,
            "unseen_fraction": 0.2,
        },
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }
    return open_workbench(load_experiment(document, experiment_catalogue()))


def test_counts_are_those_of_the_examples(bench: Workbench) -> None:
    counts = count_labels(bench.clients)
    assert counts.class_names == tuple("0123456789")
    assert [one.client for one in counts.clients] == sorted(bench.clients.parts)
    for one in counts.clients:
        data, test = bench.clients.data(one.client), bench.clients.test(one.client)
        for found, examples in (
            (one.train, data.train),
            (one.validation, data.validation),
            (one.test, test),
        ):
            labels = examples.labels.numpy()
            assert found == tuple((labels == digit).sum() for digit in range(10))
        assert one.seen == bench.clients.is_seen(one.client)
    total = np.sum([one.train for one in counts.clients], axis=0)
    assert 0 < total.sum() < len(bench.clients.dataset.train)


def test_they_are_written_once_and_read_again(bench: Workbench, tmp_path: Path) -> None:
    assert read_label_counts(tmp_path) is None
    keep_label_counts(bench.clients, tmp_path)
    assert read_label_counts(tmp_path) == count_labels(bench.clients)
    written = (tmp_path / "partition.json").stat().st_mtime_ns
    keep_label_counts(bench.clients, tmp_path)
    assert (tmp_path / "partition.json").stat().st_mtime_ns == written


def test_the_file_holds_counts_alone(bench: Workbench, tmp_path: Path) -> None:
    keep_label_counts(bench.clients, tmp_path)
    document = json.loads((tmp_path / "partition.json").read_text())
    assert document.keys() == {"class_names", "clients"}
    assert {tuple(one) for one in document["clients"]} == {
        ("client", "seen", "train", "validation", "test")
    }


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "partition.json").write_text('{"class_names": ["a"]}')
    with pytest.raises(RunError, match=r"partition\.json is damaged.*remove it"):
        read_label_counts(tmp_path)
