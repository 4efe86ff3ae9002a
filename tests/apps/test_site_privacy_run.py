"""Runs over sites with privacy of their own: budgets, secure sums, and what leaves."""

from pathlib import Path

import pytest

from knnper.client.privacy_ledger import read_updates
from knnper.errors import RunError
from knnper.privacy import Release, epsilon_of
from knnper.seeding import RandomKey
from knnper.server.selection import draw
from tests.apps.site_grid import experiment
from tests.apps.test_site_run import SEEN, lead, three

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]
NUM_ROUNDS, BUDGET, NOISE_MULTIPLIER = 6, 3, 0.02
LIMITED = "0001"
# It is asked half the time, so that the plan of three rounds is within the budget.
HALF = {
    "training.num_rounds": NUM_ROUNDS,
    "training.participation": 0.5,
    "run.max_failed_fraction": 0.5,
    "run.validate_every": 0,
}


def limit(file: Path, rounds: int) -> None:
    """Give a site noise, and a budget of ``rounds`` updates."""
    releases = [Release(NOISE_MULTIPLIER / 2, count=rounds)]
    epsilon = epsilon_of(releases, 1e-5) + 1e-3
    file.write_text(
        f"{file.read_text()}limits:\n  privacy: {{clip_norm: 1, weight: 70, "
        f"noise_multiplier: {NOISE_MULTIPLIER}, epsilon_run: {epsilon}}}\n"
    )


def rounds_asked() -> list[int]:
    """Return the rounds in which the limited site is sampled."""
    numbers = range(1, NUM_ROUNDS + 1)
    return [n for n in numbers if LIMITED in draw(SEEN, 2, n, RandomKey(0))]


def rounds_in_ledger(files: dict[str, Path], name: str) -> list[int]:
    state = files[name].parent / f"state-{name}"
    return [update.server_round for update in read_updates(state)]


def test_site_stops_at_its_budget_and_the_run_goes_on(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    limit(files[LIMITED], BUDGET)
    run = lead(three(files), experiment(**HALF), tmp_path / "run")
    refused = {
        record["server_round"]: record["failures"][LIMITED]
        for record in run.rounds()
        if record["num_failed"]
    }
    assert len(rounds_asked()) > BUDGET
    assert list(refused) == rounds_asked()[BUDGET:]
    assert all("(limits.privacy)" in reason for reason in refused.values())
    assert rounds_in_ledger(files, LIMITED) == rounds_asked()[:BUDGET]
    assert (files[LIMITED].parent / f"state-{LIMITED}" / "serving.json").exists()


def test_run_beyond_the_budget_goes_on_without_the_site(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    limit(files[LIMITED], BUDGET - 1)
    settings = experiment(**HALF, **{"run.federation.min_clients": 2})
    run = lead(three(files), settings, tmp_path / "run")
    assert rounds_in_ledger(files, LIMITED) == []
    assert [record["num_failed"] for record in run.rounds()] == [0] * NUM_ROUNDS


def test_noise_and_weight_of_a_site_are_part_of_a_secure_sum(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    for name in SEEN:
        limit(files[name], 2)
    settings = experiment(
        **{
            "training.secure_aggregation": "{name: pairwise, clip_range: 2.0}",
            "run.validate_every": 0,
        }
    )
    run = lead(three(files), settings, tmp_path / "run")
    assert [record["num_failed"] for record in run.rounds()] == [0, 0]
    assert [rounds_in_ledger(files, name) for name in SEEN] == 3 * [[1, 2]]


def test_update_that_does_not_fit_a_secure_sum_is_charged(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    for name in SEEN:
        limit(files[name], 2)
    settings = experiment(
        **{"training.secure_aggregation": "{name: secagg_plus, clip_range: 1.0e-6}"}
    )
    with pytest.raises(RunError, match="3 of 3 clients failed"):
        lead(three(files), settings, tmp_path / "run")
    # That it does not fit depends on the site's data.
    assert all(rounds_in_ledger(files, name) for name in SEEN)
