"""Whole runs with privacy for each example: their ε, and what the server learns."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from knnper.experiment import Experiment, SynchronousTiming
from knnper.experiment_file import load_experiment, to_yaml
from knnper.seeding import RandomKey
from knnper.server.example_privacy import example_privacy_summary
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.server.schedule import RoundSchedule
from knnper.server.selection import InTurn
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from knnper.strategies.core import method
from knnper.strategies.core.private_examples import epsilon_of_examples
from knnper.strategies.core.training import LocalResult, local_sgd, num_steps
from tests.simulation.knnper_process import outcome
from tests.simulation.knnper_process import simulate as run_command
from tests.strategies.method_checks import document

pytestmark = pytest.mark.integration


def experiment() -> Experiment:
    """Return a run in which two of five clients train in a round."""
    return load_experiment(
        document(
            "knn_per",
            partition={"name": "dirichlet", "num_clients": 5, "alpha": 0.5},
            model={"name": "mlp", "hidden_sizes": [8]},
            training={
                "num_rounds": 3,
                "participation": 0.4,
                "local_epochs": 2,
                "batch_size": 16,
                "example_privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0},
            },
            run={"engine": "serial", "seed": 2},
        ),
        experiment_catalogue(),
    )


def test_results_hold_the_largest_epsilon_of_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment()
    steps_of_size = Counter[int]()

    def counted(*arguments: Any, **options: Any) -> LocalResult:
        result = local_sgd(*arguments, **options)
        steps_of_size[len(arguments[2])] += result.num_steps
        return result

    monkeypatch.setattr(method, "local_sgd", counted)
    trainings = []
    for name in ("first", "second"):
        steps_of_size.clear()
        folder, bench = (
            RunFolder.create(tmp_path / name, chosen),
            open_workbench(chosen),
        )
        simulate(bench, folder, Observer(), ["test"])
        trainings.append(folder.results()["training"])
    training = trainings[0]
    assert training["state_sha256"] == trainings[1]["state_sha256"]
    assert training["train_loss"] is None
    sizes = [*bench.roster.trainable().values()]
    assert len({*sizes}) == 5, "each size names one client"
    assert 0 < len(steps_of_size) < 5, "some clients did not take part"
    spent = [
        epsilon_of_examples(chosen.training, size, steps_of_size[size])
        for size in sizes
    ]
    found = training["example_privacy"]
    assert (found["epsilon"], found["delta"]) == max(spent)
    assert 0 < found["epsilon"] < 100


def test_all_rounds_count_if_clients_may_be_late() -> None:
    chosen = experiment()
    bench = open_workbench(chosen)
    timing = SynchronousTiming(over_selection=1.5)
    chosen = replace(chosen, training=replace(chosen.training, timing=timing))
    assembly = replace(bench, experiment=chosen)
    sizes = {"a": 30, "b": 40}
    selection = InTurn(RandomKey(0), 2, lambda server_round: server_round)
    schedule = RoundSchedule(["a", "b"], 0.5, selection)
    summary = example_privacy_summary(assembly, sizes, schedule)
    spent = [
        epsilon_of_examples(
            chosen.training, size, 3 * num_steps(chosen.training, None, size)
        )
        for size in sizes.values()
    ]
    assert (summary["epsilon"], summary["delta"]) == max(spent)
    sampled = example_privacy_summary(bench, sizes, schedule)
    assert sampled["epsilon"] < summary["epsilon"]


@pytest.mark.slow
@pytest.mark.ray
def test_both_engines_end_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "private.yaml"
    path.write_text(to_yaml(experiment()))
    outcomes = []
    for engine in (("serial",), ("flower", "--workers", "2")):
        folder = tmp_path / engine[0]
        run_command(path, "--engine", *engine, "--output", folder)
        outcomes.append(outcome(folder))
    assert outcomes[0] == outcomes[1]
