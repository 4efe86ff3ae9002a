from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from knnper import simulation
from knnper.errors import ConfigError
from knnper.loading import load_experiment, parse_yaml, read_experiment, to_document
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import METHODS

EXPERIMENTS = Path(simulation.__file__).parent / "experiments"


def read(path: Path) -> Mapping[str, Any]:
    parsed: Mapping[str, Any] = parse_yaml(path.read_text(), str(path))
    return parsed


def document(**partition: Any) -> Mapping[str, Any]:
    return {
        "name": "demo",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 10,
            "alpha": 0.3,
            **partition,
        },
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_defaults_that_survive(method: str) -> None:
    catalogue = experiment_catalogue()
    overrides = [f"method={{name: {method}}}"]
    experiment = load_experiment(document(), catalogue, overrides)
    assert load_experiment(to_document(experiment), catalogue) == experiment


@pytest.mark.parametrize(
    "path",
    [one for one in sorted(EXPERIMENTS.rglob("*.yaml")) if "data" in read(one)],
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
def test_some_client_must_train(
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
