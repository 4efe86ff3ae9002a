"""The label counts, the server's examples, and the experiments that are valid."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper import simulation
from knnper.errors import ConfigError, RunError
from knnper.experiment_file import load_experiment, read_experiment
from knnper.simulation import precision
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.interface import begin, reopen
from knnper.simulation.label_counts import (
    count_labels,
    keep_label_counts,
    read_label_counts,
)
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.core.assembly import assemble


def document(**partition: Any) -> Mapping[str, Any]:
    usual = {"name": "dirichlet", "num_clients": 10, "alpha": 0.3}
    return {
        "name": "demo",
        "data": {"name": "digits"},
        "partition": {**usual, **partition},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }


def bench_of(**partition: Any) -> Workbench:
    return open_workbench(
        load_experiment(document(**partition), experiment_catalogue())
    )


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return bench_of(num_clients=5, unseen_fraction=0.2)


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


def test_counts_of_very_many_clients_are_not_written(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = len(bench.partition.clients) - 1
    monkeypatch.setattr("knnper.simulation.label_counts.MOST_DRAWN", most)
    keep_label_counts(bench.clients, tmp_path)
    assert read_label_counts(tmp_path) is None


def test_counts_are_written_once_and_read_again(
    bench: Workbench, tmp_path: Path
) -> None:
    path = tmp_path / "partition.json"
    assert read_label_counts(tmp_path) is None
    keep_label_counts(bench.clients, tmp_path)
    assert read_label_counts(tmp_path) == count_labels(bench.clients)
    written = path.stat().st_mtime_ns
    keep_label_counts(bench.clients, tmp_path)
    assert path.stat().st_mtime_ns == written
    # It holds counts alone.
    document = json.loads(path.read_text())
    assert document.keys() == {"class_names", "clients", "num_skipped"}
    keys = {tuple(one) for one in document["clients"]}
    assert keys == {("client", "seen", "train", "validation", "test")}
    path.write_text('{"class_names": ["a"]}')
    with pytest.raises(RunError, match=r"partition\.json is damaged.*remove it"):
        read_label_counts(tmp_path)


def test_the_server_has_what_it_keeps() -> None:
    bench = bench_of(proxy_fraction=0.1)
    assert bench.task.proxy is not None
    kept, positions = bench.task.proxy(), bench.partition.proxy
    train = bench.clients.dataset.train
    assert len(kept) == len(positions) == round(0.1 * len(train))
    assert torch.equal(kept.labels, torch.from_numpy(train.labels[positions]))
    assert torch.equal(kept.images, torch.tensor(train.images[positions]))
    given = {int(i) for part in bench.partition.clients for i in part.train}
    assert not given & set(positions.tolist())
    # By default it keeps nothing.
    default = bench_of()
    assert default.task.proxy is None
    assert len(default.partition.proxy) == 0


EXPERIMENTS = Path(simulation.__file__).parent / "experiments"


@pytest.mark.parametrize(
    "path",
    [
        one
        for one in sorted(EXPERIMENTS.rglob("*.yaml"))
        if "\ndata:" in one.read_text()
    ],
    ids=lambda p: p.stem,
)
def test_shipped_experiments_are_valid(path: Path) -> None:
    experiment = read_experiment(path, experiment_catalogue())
    assert experiment.name == path.stem


@pytest.mark.parametrize(
    ("participation", "unseen_fraction", "message"),
    [
        (0.1, 0.0, None),
        (0.125, 0.2, None),
        (0.12, 0.2, "training.participation: found 0.12 of 8 seen .* at least 0.125"),
        (0.09, 0.0, "training.participation: found 0.09 of 10 seen clients"),
        (1.0, 0.94, None),
        (1.0, 0.96, "partition.unseen_fraction: found 0.96 of 10 .* leaves none"),
    ],
)
def test_some_train(
    participation: float, unseen_fraction: float, message: str | None
) -> None:
    described = document(unseen_fraction=unseen_fraction)
    overrides = [f"training.participation={participation}"]
    catalogue = experiment_catalogue()
    if message is None:
        load_experiment(described, catalogue, overrides)
        return
    with pytest.raises(ConfigError, match=message):
        load_experiment(described, catalogue, overrides)


def test_partitions_of_unknown_size_are_let_through() -> None:
    natural = ["partition={name: natural}", "training.participation=0.001"]
    experiment = load_experiment(document(), experiment_catalogue(), natural)
    assert experiment.partition.name == "natural"


MEASURED = {
    **document(num_clients=2),
    "training": {"precision": "auto", "num_rounds": 1},
}


@pytest.mark.parametrize(
    ("most", "expected"), [(0.0, "float32"), (math.inf, "bfloat16")]
)
def test_a_simulation_takes_the_faster_precision_and_stays_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    most: float,
    expected: str,
) -> None:
    # With these, any time is too long, or short enough, for bfloat16.
    monkeypatch.setattr(precision, "_WORTH_IT", most)
    made, folder = begin(MEASURED, output=tmp_path / "run")
    assert made.experiment.training.precision == expected
    assert f"training.precision is {expected} here" in caplog.text
    monkeypatch.setattr(precision, "_WORTH_IT", math.inf if most == 0.0 else 0.0)
    again, _ = reopen(folder.path)
    assert again.experiment.training.precision == expected


def test_where_bfloat16_cannot_be_run_it_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(precision: str, device: torch.device) -> None:
        if precision == "bfloat16":
            raise RunError("this CPU cannot")

    monkeypatch.setattr(precision, "_WORTH_IT", math.inf)
    monkeypatch.setattr("knnper.strategies.core.assembly.require_precision", refuse)
    experiment = load_experiment(MEASURED, experiment_catalogue())
    assert open_workbench(experiment).experiment.training.precision == "float32"


def test_real_clients_are_told_a_precision() -> None:
    experiment = load_experiment(MEASURED, experiment_catalogue())
    spec = bench_of().task.spec
    with pytest.raises(ConfigError, match="found auto, expected float32 or bfloat16"):
        assemble(experiment, spec)
