"""The server of a simulation has the examples that no client was dealt."""

from typing import Any

import torch

from knnper.loading import load_experiment
from knnper.simulation.workbench import Workbench, experiment_catalogue, open_workbench


def bench_of(**partition: Any) -> Workbench:
    document = {
        "name": "kept",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 3, **partition},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }
    return open_workbench(load_experiment(document, experiment_catalogue()))


def test_the_server_has_what_it_keeps() -> None:
    bench = bench_of(proxy_fraction=0.1)
    assert bench.task.proxy is not None
    kept, positions = bench.task.proxy(), bench.partition.proxy
    train = bench.clients.dataset.train
    assert len(kept) == len(positions) == round(0.1 * len(train))
    assert torch.equal(kept.labels, torch.from_numpy(train.labels[positions]))
    assert torch.equal(kept.images, torch.tensor(train.images[positions]))
    dealt = {int(i) for part in bench.partition.clients for i in part.train}
    assert not dealt & set(positions.tolist())


def test_by_default_it_keeps_nothing() -> None:
    bench = bench_of()
    assert bench.task.proxy is None
    assert len(bench.partition.proxy) == 0
