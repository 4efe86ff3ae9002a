"""Virtual clients' shares as files that real clients read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.arrays import NpzSettings
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.data.task_file import read_task
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.simulation.partition.allocation import Assignment
from knnper.simulation.partition.clients import Partition
from knnper.simulation.partition.export import LABELS_FILE, export_shares
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.partition.settings import PartitionSettings
from knnper.simulation.partition.split import partition_of
from knnper.simulation.virtual_clients import VirtualClients

CHOICES: dict[str, dict[str, Any]] = {
    "iid": {"num_clients": 5, "unseen_fraction": 0.4},
    "dirichlet": {"num_clients": 9, "alpha": 0.1},
    "pathological": {"num_clients": 4, "classes_per_client": 2},
    "natural": {},
}


def arrays(count: int, seed: int) -> LabelledArrays:
    generator = np.random.default_rng(seed)
    return LabelledArrays(
        generator.integers(0, 256, (count, 4, 3, 1), dtype=np.uint8),
        generator.integers(0, 6, count),
        generator.integers(0, 7, count),
    )


@pytest.fixture
def dataset() -> Dataset:
    spec = InputSpec((4, 3, 1), 6, (0.4,), (0.2,))
    # Labels in another order than that of the names.
    names = ("fox", "cat", "12", "3", "elk", "ant")
    return Dataset("made", arrays(150, 1), arrays(60, 2), spec, names)


def dealt(dataset: Dataset, name: str) -> Partition:
    spec = PARTITIONS[name]
    settings = spec.settings_type(**CHOICES[name])
    key = RandomKey(3)
    return partition_of(spec.split(dataset, settings, key), settings, key)


def read(folder: Path, client: str) -> SiteData:
    task = read_task(folder / LABELS_FILE)
    choice = Choice[Settings]("npz", NpzSettings(f"{client}.npz"))
    return open_site(choice, folder, task)


def test_shares_of_rows_name_their_features(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = (np.arange(40, dtype=np.float32) / 3).astype(np.float32)
    rows = rows.reshape(20, 1, 1, 2)
    part = LabelledArrays(rows, np.arange(20) % 2)
    spec = InputSpec((1, 1, 2), 2, (0.0, 0.0), (1.0, 1.0), "float32")
    dataset = Dataset("rows", part, part, spec, ("a", "b"), feature_names=("x", "y"))
    partition = dealt(dataset, "iid")
    export_shares(dataset, partition, tmp_path / "shares")
    data = read(tmp_path / "shares", partition.clients[0].shown)
    assert data.task.feature_names == ("x", "y")
    assert not caplog.messages
    # A federation that has them in another order finds them by name.
    task = dataclasses.replace(data.task, feature_names=("y", "x"))
    choice = Choice[Settings]("npz", NpzSettings(f"{partition.clients[0].shown}.npz"))
    swapped = open_site(choice, tmp_path / "shares", task)
    inputs, expected = swapped.train.examples.images, data.train.examples.images
    assert torch.equal(inputs, expected.flip(3))


@pytest.mark.parametrize("name", CHOICES)
def test_a_real_client_reads_what_a_virtual_one_has(
    dataset: Dataset, name: str, tmp_path: Path
) -> None:
    partition = dealt(dataset, name)
    folder = tmp_path / "shares"
    files = export_shares(dataset, partition, folder)
    clients = VirtualClients.of(dataset, partition)
    assert files == [f"{client}.npz" for client in sorted(clients.parts)]
    assert {path.name for path in folder.iterdir()} == {*files, LABELS_FILE}
    for client in sorted(clients.parts):
        part = clients.parts[client]
        if not sum(map(len, (part.train, part.validation, part.test))):
            continue
        found, expected = read(folder, client), clients.data(client)
        pairs = [
            ("train", found.train, expected.train),
            ("validation", found.validation, expected.validation),
            ("test", found.test, clients.test(client)),
        ]
        for split, one, other in pairs:
            assert torch.equal(one.examples.images, other.images)
            assert torch.equal(one.examples.labels, other.labels)
            assert one.examples.images.dtype == other.images.dtype
            assert one.names == tuple(f"{split}/{n:05d}" for n in range(len(other)))
        assert found.task.spec == dataset.spec
        assert found.task.class_names == dataset.class_names


def test_the_agreement_says_who_is_unseen(dataset: Dataset, tmp_path: Path) -> None:
    partition = dealt(dataset, "iid")
    export_shares(dataset, partition, tmp_path / "shares")
    document = json.loads((tmp_path / "shares" / LABELS_FILE).read_text())
    assert {client: facts["seen"] for client, facts in document["clients"].items()} == {
        client.name: client.seen for client in partition.clients
    }
    totals = [
        sum(facts[f"num_{split}"] for facts in document["clients"].values())
        for split in ("train", "validation", "test")
    ]
    assert totals == [120, 30, 60]


def test_a_client_without_data_says_so(dataset: Dataset, tmp_path: Path) -> None:
    nobody = np.empty(0, dtype=np.int64)
    everything = Assignment(
        train=(np.arange(150), nobody), test=(np.arange(60), nobody)
    )
    partition = partition_of(everything, PartitionSettings(), RandomKey(0))
    export_shares(dataset, partition, tmp_path / "shares")
    assert len(read(tmp_path / "shares", "0000").test) == 60
    with pytest.raises(DataError, match=r"0001\.npz contains no examples"):
        read(tmp_path / "shares", "0001")


def test_a_folder_is_never_written_over(dataset: Dataset, tmp_path: Path) -> None:
    partition = dealt(dataset, "iid")
    with pytest.raises(DataError, match="already exists, expected a new folder"):
        export_shares(dataset, partition, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        export_shares(dataset, partition, tmp_path / "file" / "shares")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_nothing_is_left_of_an_export_that_failed(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path, **_: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", no_room)
    with pytest.raises(DataError, match="cannot be written: no space left"):
        export_shares(dataset, dealt(dataset, "iid"), tmp_path / "shares")
    assert list(tmp_path.iterdir()) == []
