"""Lower bounds on ε of this project's mechanisms stay below what they claim."""

from dataclasses import replace
from typing import Any

import pytest

from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.server.private_training import PrivateTraining
from knnper.simulation.audit.canaries import (
    private_answers_game,
    private_training_game,
)
from knnper.simulation.audit.one_run import CanaryGame, audit_in_one_run
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.workbench import open_workbench

pytestmark = pytest.mark.integration

SEEDS = range(4)


def lower_bounds(game: CanaryGame | None) -> list[float]:
    """Audit with several seeds; fail if a bound contradicts the claim."""
    assert game is not None
    bounds = [audit_in_one_run(game, RandomKey(seed)).epsilon for seed in SEEDS]
    assert not any(bound is None or bound.is_violated for bound in bounds)
    return [bound.lower for bound in bounds if bound is not None]


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_private_answers_keep_their_epsilon(epsilon: float) -> None:
    settings = PrivateAnswerSettings(epsilon=epsilon, threshold=0.5)
    bounds = lower_bounds(private_answers_game(settings))
    if epsilon == 8:  # the audit has some power
        assert sum(bounds) / len(bounds) > 1


def test_private_answers_with_too_little_noise_are_found_out() -> None:
    settings = PrivateAnswerSettings(epsilon=20.0, threshold=0.5)
    game = replace(private_answers_game(settings), epsilon=0.5)
    bound = audit_in_one_run(game, RandomKey(0)).epsilon
    assert bound is not None
    assert bound.is_violated


def private_game(num_rounds: int = 5, **changes: Any) -> CanaryGame | None:
    document = {
        "name": "private",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 20},
        "model": {"name": "softmax_regression"},
        "training": {"num_rounds": num_rounds, "batch_size": 16},
        "method": {"name": "knn_per"},
        "privacy": {"clip_norm": 0.5, "noise_multiplier": 1.5},
        "run": {"engine": "serial"},
        **changes,
    }
    experiment = load_experiment(document, experiment_catalogue())
    return private_training_game(open_workbench(experiment), num_rounds)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": {"num_rounds": 5, "participation": 0.5}},
        {
            "privacy": {
                "clip_norm": 0.5,
                "noise_multiplier": 1.5,
                "noise_shares": 20,
            }
        },
        {
            "training": {"num_rounds": 5, "participation": 0.5},
            "privacy": {"clip_norm": 0.5, "noise_multiplier": 1.5, "correlated": True},
        },
        {
            "privacy": {"clip_norm": 0.5, "noise_multiplier": 1.5, "adaptive": True},
            "method": {"name": "fedavgm"},
        },
    ],
    ids=["server", "poisson", "clients", "correlated", "adaptive"],
)
def test_private_training_keeps_its_epsilon(changes: dict[str, Any]) -> None:
    bounds = lower_bounds(private_game(**changes))
    assert len(bounds) == len(SEEDS)


def test_audit_of_private_training_has_power() -> None:
    bounds = lower_bounds(private_game())
    assert sum(bounds) / len(bounds) > 1


def test_private_training_that_forgets_its_noise_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrivateTraining, "sum_noise", 1e-6)
    game = private_game(privacy={"clip_norm": 0.5, "noise_multiplier": 20.0})
    assert game is not None
    bound = audit_in_one_run(game, RandomKey(0)).epsilon
    assert bound is not None
    assert bound.claimed < 2 < bound.lower


@pytest.mark.parametrize(
    "privacy",
    [
        {"clip_norm": 0.5, "noise_multiplier": 1.0},
        {"clip_norm": 0.5, "noise_multiplier": 1.2, "correlated": True},
    ],
    ids=["poisson", "correlated"],
)
def test_canaries_take_part_as_rarely_as_the_claim_assumes(
    privacy: dict[str, Any],
) -> None:
    training = {"num_rounds": 10, "participation": 0.1}
    game = private_game(num_rounds=10, training=training, privacy=privacy)
    assert game is not None
    bound = audit_in_one_run(game, RandomKey(0)).epsilon
    # Canaries in every round would be told apart with a bound above the claim.
    assert bound is not None
    assert not bound.is_violated


def test_run_without_noise_claims_nothing() -> None:
    assert private_game(privacy=None) is None
