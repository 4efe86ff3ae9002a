"""Clients that misbehave, and clients that are not let in."""

import re
import shutil

import numpy as np
import pytest

from tests.federation import site_tricks as trick
from tests.federation.small_federation import SEEN, Federation, Found
from tests.processes import wait_until

pytestmark = pytest.mark.slow

# The client with most examples, whose update is looked at first.
BAD = "0003"
ROUND_TIMEOUT_S = 25

WRONG = {
    trick.NAN: "weights is not finite",
    trick.INFINITE: "weights is not finite",
    trick.SHAPE: "expected tensors of shapes",
    trick.NORM: "the update moved by a norm of .*, more than .*max_update_norm_ratio",
    trick.SCALED: "weights moved by a norm of .* run.max_update_median_ratio",
    trick.RUDE: r"x\\n2026-01-01 ERROR server: all is lost\\x1b\[2J\[red\]<script>y",
    trick.NOTHING: "expected a number of training examples, at least 1, found 0",
    trick.HANG: f"its deadline passed|no answer within {ROUND_TIMEOUT_S} s",
}


def test_updates_that_cannot_be_used_are_left_out(found: Found) -> None:
    federation = found()
    plan = {trick.training(number): deed for number, deed in enumerate(WRONG, 1)}
    federation.tricks(BAD).plan(plan)
    server = federation.server()
    federation.clients()
    num_rounds = len(WRONG) + 1
    submitted, run = federation.submit(
        f"training.num_rounds={num_rounds}",
        f"run.federation.round_timeout_s={ROUND_TIMEOUT_S}",
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [*[1] * len(WRONG), 0]
    assert [one["num_clients"] for one in run.rounds] == [*[2] * len(WRONG), 3]
    for number, reason in enumerate(WRONG.values(), 1):
        words = rf"round {number}: client {BAD} failed: .*({reason})"
        for told in (federation.run_log, server.written, submitted.written):
            assert re.search(words, told, re.MULTILINE), words
            assert "\x1b[2J" not in told
        assert re.search(reason, run.rounds[number - 1]["failures"][BAD])
    assert set(run.clients) == set(SEEN), "it gets the model all the same"


def test_no_client_takes_the_mean_by_what_it_says_of_itself(found: Found) -> None:
    federation = found()
    boasts = dict.fromkeys(
        ("introduction", trick.training(1), trick.training(2)),
        trick.BOAST,
    )
    for name in SEEN:
        planned = boasts if name == BAD else {}
        federation.tricks(name).plan({"models": trick.KEEP_MODELS, **planned})
    server = federation.server()
    federation.clients()
    sizes = {name: federation.num_train(name) for name in SEEN}
    others = sum(sizes.values()) - sizes[BAD]
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    # As much as all others together, and no more.
    assert mean_of_round_1(federation, {**sizes, BAD: others})
    assert f"client {BAD} reports {trick.BOASTED} training examples" in server.written
    # What the operator fixes counts from the next run on.
    fixed = federation.server_file.parent / "authorized" / f"{BAD}.num_train"
    fixed.write_text("77\n")
    roster = federation.server_file.parent / "state" / "roster.json"
    wait_until(lambda: '"num_train": 77' in roster.read_text(), "the number is known")
    shutil.rmtree(federation.folder / "run")
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    assert mean_of_round_1(federation, {**sizes, BAD: 77})


def mean_of_round_1(federation: Federation, weights: dict[str, int]) -> bool:
    """Return whether what was sent in round 2 is the mean with these weights."""
    mean = sum(
        count * model(federation, name, "trained-1").astype(np.float64)
        for name, count in weights.items()
    ) / sum(weights.values())
    return np.allclose(model(federation, BAD, "sent-2"), mean, rtol=1e-5, atol=1e-7)


def model(federation: Federation, name: str, which: str) -> np.ndarray:
    found: np.ndarray = np.load(federation.client_folder(name) / f"{which}.npy")
    return found


HONEST, TAMPERED, IMPOSTOR = SEEN


def test_a_taken_name_and_a_model_that_was_changed(found: Found) -> None:
    federation = found()
    federation.configure(IMPOSTOR, name=HONEST)
    federation.tricks(TAMPERED).plan({trick.DISTRIBUTING: trick.TAMPER})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit("run.federation.min_clients=2")
    assert submitted.wait() == 0
    objection = f"its key is registered as {IMPOSTOR}, and it calls itself {HONEST}"
    assert f"is refused: {objection}" in federation.run_log
    nodes[IMPOSTOR].wait_for(f"the server refuses this client: .*{objection}", 30)
    noted = federation.client_folder(IMPOSTOR) / "state/refusals.jsonl"
    assert objection in noted.read_text()
    assert set(run.clients) == {HONEST}
    assert run.results["model_distribution"]["offline"] == [TAMPERED]
    failed = f"client {TAMPERED} could not personalise: .*\\(other_model\\)"
    assert re.search(failed, federation.run_log)
    wrong = "the model that the server distributed: expected the model"
    assert wrong in nodes[TAMPERED].written
    assert not (federation.client_folder(TAMPERED) / "state/serving.json").exists()
