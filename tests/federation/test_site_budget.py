"""A site with a budget of ε among real processes: it stops, and the run goes on."""

import collections

import pytest

from knnper.client.privacy_ledger import read_updates
from knnper.privacy import Release, epsilon_of
from knnper.seeding import RandomKey
from knnper.server.selection import draw
from tests.federation.small_federation import SEEN, Found

pytestmark = pytest.mark.slow

NUM_ROUNDS, BUDGET = 6, 3
NOISE_MULTIPLIER = 0.02


def test_site_stops_at_its_budget_and_the_run_goes_on(found: Found) -> None:
    cohorts = [
        draw(SEEN, 2, number, RandomKey(0)) for number in range(1, NUM_ROUNDS + 1)
    ]
    num_asked = collections.Counter(name for cohort in cohorts for name in cohort)
    limited = max(SEEN, key=lambda name: num_asked[name])
    rounds = [n for n, cohort in enumerate(cohorts, 1) if limited in cohort]
    assert len(rounds) > BUDGET
    federation = found()
    releases = [Release(NOISE_MULTIPLIER / 2, count=BUDGET)]
    privacy = {
        "clip_norm": 1.0,
        "noise_multiplier": NOISE_MULTIPLIER,
        "epsilon_run": epsilon_of(releases, 1e-5) + 1e-3,
        "weight": 100,
    }
    federation.configure(limited, limits={"privacy": privacy})
    federation.server()
    federation.clients()
    submitted, run = federation.submit(
        # On average it is asked three times, so that the plan is within the budget.
        "training.participation=0.5",
        f"training.num_rounds={NUM_ROUNDS}",
        "run.max_failed_fraction=0.5",
    )
    assert submitted.wait() == 0
    refused = {
        record["server_round"]: record["failures"][limited]
        for record in run.rounds
        if record["num_failed"]
    }
    assert list(refused) == rounds[BUDGET:]
    assert all("(limits.privacy)" in reason for reason in refused.values())
    state = federation.client_folder(limited) / "state"
    updates = read_updates(state)
    assert [update.server_round for update in updates] == rounds[:BUDGET]
    assert set(run.clients) == {*SEEN} - {limited}, "it withholds its metrics"
    assert (state / "serving.json").exists(), "it gets the model"
