"""The figure of FedBasis' collapse, on a few of the digits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import papers.collapse
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.workbench import open_workbench, simulate
from knnper.strategies.fedbasis import FedBasisSettings, local_round
from papers.collapse import (
    VARIANTS,
    BasesFollowed,
    follow_bases,
    mean_entropy,
    mean_similarity,
    settings_of,
)
from tests.papers.small_files import BASE, experiment


def small(**method: Any) -> Experiment:
    return experiment(
        partition={**BASE["partition"], "num_clients": 5, "unseen_fraction": 0.2},
        model={"name": "mlp", "hidden_sizes": [8]},
        training={"num_rounds": 2, "participation": 0.75},
        method=method,
    )


def test_the_entropy_is_a_fraction_of_the_uniform_one() -> None:
    assert mean_entropy(torch.full((4, 2), 0.25)) == pytest.approx(1.0)
    assert mean_entropy(torch.tensor([[1.0], [0.0]])) == 0.0
    # One block as sure as can be, the other of ¼ and ¾.
    mixed = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    both = torch.tensor([[1.0, 0.25], [0.0, 0.75]])
    assert mean_entropy(both) == pytest.approx(mixed / 2)
    assert mean_entropy(torch.ones(1, 3)) == 1.0


def test_the_similarity_is_the_mean_over_pairs() -> None:
    east, north, west = (torch.tensor(v) for v in ([2.0, 0.0], [0.0, 1.0], [-3.0, 0.0]))
    assert mean_similarity([east, north]) == 0.0
    assert mean_similarity([east, east]) == pytest.approx(1.0)
    # 0, -1 and 0.
    assert mean_similarity([east, north, west]) == pytest.approx(-1 / 3)


def test_what_is_treated() -> None:
    settings = FedBasisSettings(num_bases=5, temperature=0.3)
    nothing, descent, sharpened, warm, every = [
        treat(settings) for treat in VARIANTS.values()
    ]
    untreated: dict[str, Any] = {"major_basis": False, "coordinate_descent": False}
    untreated |= {"temperature": 1.0, "warm_start_fraction": 0.0}
    assert nothing == FedBasisSettings(num_bases=5, **untreated)
    assert descent == replace(nothing, coordinate_descent=True)
    assert sharpened == replace(descent, temperature=0.3)
    assert warm == replace(nothing, warm_start_fraction=0.3)
    assert every == settings


def follow(**method: Any) -> BasesFollowed:
    return follow_bases(open_workbench(small(name="fedbasis", **method)))


def test_bases_are_followed_from_round_to_round() -> None:
    settings = {"num_bases": 2, "major_basis": False, "warm_start_fraction": 0.0}
    record = follow(**settings, unseen_epochs=1).as_record()
    assert record == follow(**settings, unseen_epochs=1).as_record()
    assert len(record["similarity"]) == len(record["entropy"]) == 3
    assert all(-1 <= value <= 1 for value in record["similarity"])
    assert record["entropy"][0] == 1.0
    assert all(0 < value < 1 for value in record["entropy"][1:])
    assert 0 < record["accuracy"] <= 1
    assert 0 <= record["unseen_accuracy"] <= 1


def test_there_are_no_bases_in_the_warm_start() -> None:
    record = follow(num_bases=2, warm_start_fraction=0.5).as_record()
    assert record["similarity"][0] is None
    assert record["similarity"][1:] == pytest.approx([1.0, 1.0], abs=0.1)
    assert record["entropy"][:2] == [1.0, 1.0]
    assert record["entropy"][2] < 1.0


def test_what_is_followed_is_a_run(tmp_path: Path) -> None:
    experiment = small(name="fedbasis", num_bases=2, warm_start_fraction=0.5)
    folder = RunFolder.create(tmp_path / "run", experiment)
    found = follow_bases(open_workbench(experiment))
    run = simulate(open_workbench(experiment), folder, Observer(), ["test"])
    assert found.trained.fingerprint == run["training"]["state_sha256"]
    record = found.as_record()
    for group, name in (("seen", "accuracy"), ("unseen", "unseen_accuracy")):
        assert record[name] == run[group]["accuracy_weighted"]


def test_a_client_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_workbench(small(name="fedbasis", num_bases=2))
    largest = max(bench.roster.trainable().values())

    def breaking(*arguments: Any) -> Any:
        alpha, update = local_round(*arguments)
        if len(arguments[3]) < largest:
            return alpha, update
        return alpha, replace(update, models=tuple(one / 0.0 for one in update.models))

    whole = follow_bases(bench)
    monkeypatch.setattr(papers.collapse, "local_round", breaking)
    without = follow_bases(bench)
    assert without.trained.fingerprint != whole.trained.fingerprint
    assert all(model.isfinite().all() for model in without.trained.state.models)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg"}, "found the method fedavg, expected fedbasis"),
        ({"name": "fedbasis", "num_bases": 1}, r"num_bases 1, expected 2 or more"),
    ],
)
def test_it_needs_bases_to_compare(method: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        settings_of(small(**method))
