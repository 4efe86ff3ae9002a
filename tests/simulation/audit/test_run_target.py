"""Attacks on runs: they succeed on planted leaks, and find nothing without a leak."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder, write_document
from knnper.simulation.audit import run_target
from knnper.simulation.audit.audit import audit_target, read_audit
from knnper.simulation.audit.figures import AttackResult
from knnper.simulation.audit.membership import lira_scores
from knnper.simulation.audit.reconstruction import (
    analytic_inputs,
    matched_inputs,
    psnr_of_nearest,
)
from knnper.simulation.audit.run_target import MEAN, SINGLE, RunTarget, open_run
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import Workbench, open_workbench

pytestmark = pytest.mark.integration


def run_on_noise(folder: Path, **changes: Any) -> Path:
    """Return a finished run on random pixels with random labels, in two clients.

    A model can only memorise them: no example helps with another.
    """
    generator = RandomKey(5, ("pixels",)).numpy()
    arrays: dict[str, Any] = {}
    for split, count in (("train", 200), ("test", 160)):
        arrays[f"{split}_inputs"] = generator.integers(
            0, 256, (count, 6, 6, 1), "uint8"
        )
        arrays[f"{split}_labels"] = generator.integers(0, 4, count)
    np.savez(folder / "noise.npz", **arrays)
    document = {
        "name": "noise",
        "data": {"name": "npz", "path": str(folder / "noise.npz")},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "mlp", "hidden_sizes": [64]},
        "training": {
            "num_rounds": 2,
            "local_epochs": 30,
            "batch_size": 8,
            "learning_rate": 0.1,
        },
        "method": {"name": "knn_per"},
        "run": {"engine": "serial"},
        **changes,
    }
    experiment = load_experiment(document, experiment_catalogue())
    run = RunFolder.create(folder / "run", experiment)
    simulate(open_workbench(experiment), run, Observer(), ["test"])
    return run.path


def results(target: RunTarget, *attacks: str) -> list[AttackResult]:
    return list(audit_target(target, attacks, seed=0).results)


def auc(result: AttackResult) -> tuple[float, float]:
    area = result.figures["auc"]
    return area.low, area.high


def test_overfitted_model_and_exact_memory_leak_membership(tmp_path: Path) -> None:
    memory = {"name": "knn", "num_neighbors": 3, "knn_weights": [0.5]}
    target = open_run(run_on_noise(tmp_path, personalization=memory), num_shadows=2)
    attacks = ("lira", "labels", "probabilities", "neighbors", "waka")
    lira, labels, probabilities, neighbors, waka = results(target, *attacks)
    assert auc(lira)[0] > 0.7
    assert lira.figures["tpr_at_fpr_1%"].value > 0.1
    assert lira.samples["others"] == 160
    assert neighbors.figures["auc"].value == 1
    assert neighbors.figures["tpr_at_fpr_0.1%"].value == 1
    assert auc(labels)[0] > 0.7
    assert auc(probabilities)[0] > 0.8
    assert auc(waka)[0] > 0.8


def test_model_that_never_saw_the_data_is_attacked_by_chance(tmp_path: Path) -> None:
    training = {"num_rounds": 1, "learning_rate": 1e-9, "batch_size": 8}
    run = run_on_noise(tmp_path, training=training, method={"name": "fedavg"})
    target = open_run(run, num_shadows=2)
    lira, neighbors = results(target, "lira", "neighbors")
    low, high = auc(lira)
    assert low < 0.5 < high
    assert neighbors.left_out == "the clients of the run have no memory"


def test_each_example_is_missing_in_a_shadow_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"num_rounds": 1, "learning_rate": 1e-9, "batch_size": 8}
    target = open_run(run_on_noise(tmp_path, training=training), num_shadows=3)
    num_trained, is_out = list[int](), list[NDArray[np.bool_]]()
    train, score = RunTarget._train, lira_scores

    def counting_train(self: RunTarget, bench: Workbench, key: RandomKey) -> Any:
        num_trained.append(sum(bench.roster.trainable().values()))
        return train(self, bench, key)

    def keeping_scores(logits: Any, shadows: Any, missing: Any) -> Any:
        is_out.append(missing)
        return score(logits, shadows, missing)

    monkeypatch.setattr(RunTarget, "_train", counting_train)
    monkeypatch.setattr(run_target, "lira_scores", keeping_scores)
    (lira,) = results(target, "lira")
    members = sum(target.bench.roster.trainable().values())
    assert lira.samples == {"members": members, "others": 160}
    # The last of three models has no counterpart.
    assert (is_out[0][:2].sum(axis=0) == 1).all()
    assert num_trained == (~is_out[0]).sum(axis=1).tolist()


def test_test_example_of_several_clients_is_one_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "name": "domains",
        "data": {"name": "digit_domains"},
        # Three clients of each domain, with the same test examples.
        "partition": {
            "name": "pflbed",
            "seen_clients_per_domain": 3,
            "unseen_clients_per_domain": 0,
        },
        "model": {"name": "softmax_regression"},
        "training": {"num_rounds": 1},
        "method": {"name": "fedavg"},
        "run": {"engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    run = RunFolder.create(tmp_path / "run", experiment)
    simulate(open_workbench(experiment), run, Observer(), ["test"])
    target = open_run(run.path, num_shadows=2)
    trained_on = list[set[int]]()
    train = RunTarget._train

    def keeping_train(self: RunTarget, bench: Workbench, key: RandomKey) -> Any:
        parts = bench.clients.parts.values()
        trained_on.append({row for part in parts for row in part.train.tolist()})
        return train(self, bench, key)

    monkeypatch.setattr(RunTarget, "_train", keeping_train)
    (lira,) = results(target, "lira")
    assert lira.samples["others"] == len(target.bench.dataset.test)
    # The models of a pair share no example.
    assert trained_on[0].isdisjoint(trained_on[1])


def linear_target(folder: Path) -> RunTarget:
    training = {"num_rounds": 1, "learning_rate": 0.05, "batch_size": 8}
    model = {"name": "softmax_regression"}
    return open_run(run_on_noise(folder, training=training, model=model), 2)


def test_update_of_one_example_reveals_it(tmp_path: Path) -> None:
    target = linear_target(tmp_path)
    first, single = results(target, "analytic")
    assert single.figures["recognisable"].value == 1
    assert single.figures["median_psnr_db"].low > 40
    # Many examples behind an update hide each other.
    assert first.samples["inputs"] > 100
    assert first.figures["recognisable"].value < 0.1


def test_update_that_changes_nothing_reveals_nothing(tmp_path: Path) -> None:
    target = linear_target(tmp_path)
    update = target.observed(RandomKey(0))[SINGLE][0]
    still = replace(update, decrease=torch.zeros_like(update.decrease))
    task = target.bench.task
    candidates = analytic_inputs(task, still)
    assert psnr_of_nearest(task, candidates, still.examples).item() < 15


def test_secure_aggregation_hides_an_example_among_those_of_others(
    tmp_path: Path,
) -> None:
    run = run_on_noise(
        tmp_path,
        training={
            "num_rounds": 1,
            "learning_rate": 0.05,
            "batch_size": 8,
            "participation": 0.5,
            "secure_aggregation": {"name": "pairwise"},
        },
        model={"name": "softmax_regression"},
        partition={"name": "iid", "num_clients": 6},
    )
    target = open_run(run, 2)
    mean, matching = results(target, "analytic", "gradient_matching")
    assert mean.figures["recognisable"].value == 0
    assert mean.samples["inputs"] == 79
    assert matching.left_out == "the server sees no single update"
    (seen,) = target.observed(RandomKey(0))[MEAN]
    # The server sees the mean, with which it has made the last state.
    moved = seen.weights - seen.decrease
    assert torch.allclose(moved, target.ended.last.state.weights, atol=1e-4)


def test_run_that_stopped_at_its_budget_is_audited_as_far_as_it_went(
    tmp_path: Path,
) -> None:
    run = run_on_noise(
        tmp_path,
        training={"num_rounds": 5, "batch_size": 8},
        privacy={
            "clip_norm": 0.01,
            "noise_multiplier": 4,
            "epsilon": 1.0,
            "delta": 1e-3,
        },
    )
    target = open_run(run, 2)
    assert 1 <= target.ended.last.server_round < 5
    assert target.facts["rounds"] == target.ended.last.server_round
    (result,) = results(target, "one_run")
    assert result.epsilon is not None
    assert not result.epsilon.is_violated


def test_gradient_matching_finds_an_input_and_needs_the_update(tmp_path: Path) -> None:
    target = linear_target(tmp_path)
    task = target.bench.task
    update = target.observed(RandomKey(0))[SINGLE][0]
    # Without the update the search ends with some other input.
    unrelated = replace(update, decrease=torch.ones_like(update.decrease))
    psnr = [
        psnr_of_nearest(
            task, matched_inputs(task, attacked, RandomKey(1)), update.examples
        ).item()
        for attacked in (update, unrelated)
    ]
    assert psnr[0] > 25
    assert psnr[1] < 15


def test_first_updates_are_those_of_the_run(tmp_path: Path) -> None:
    target = linear_target(tmp_path)
    sizes = target.bench.roster.trainable()
    total = torch.zeros_like(target.ended.last.state.weights, dtype=torch.float64)
    for client in target.trainable:
        update = target.update(client, target.bench.clients.data(client))
        total += sizes[client] * (update.weights - update.decrease).double()
    mean = (total / sum(sizes.values())).float()
    assert torch.allclose(mean, target.ended.last.state.weights, atol=1e-6)


def test_record_is_read_back_as_written(tmp_path: Path) -> None:
    training = {"num_rounds": 1, "batch_size": 8}
    target = open_run(run_on_noise(tmp_path, training=training), 2)
    audit = audit_target(target, ("neighbors", "analytic"), seed=4)
    write_document(tmp_path / "audit.json", asdict(audit))
    assert read_audit(tmp_path / "audit.json") == audit
    assert audit.facts["experiment"]["method"]["name"] == "knn_per"
    # The same seed gives the same figures.
    again = audit_target(target, ("neighbors", "analytic"), seed=4)
    assert again.results == audit.results
