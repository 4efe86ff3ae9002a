"""Clients that send nonsense, or nothing: left out of the round, named and counted."""

import re
import shutil

import numpy as np
import pytest

from tests.federation.site_tricks import (
    BOAST,
    BOASTED,
    HANG,
    INFINITE,
    KEEP_MODELS,
    NAN,
    NORM,
    NOTHING,
    RUDE,
    SCALED,
    SHAPE,
    training,
)
from tests.federation.small_federation import SEEN, Federation, Found
from tests.processes import wait_until

pytestmark = pytest.mark.slow

# The client with most examples, whose update is looked at first.
BAD = "0003"
ROUND_TIMEOUT_S = 25
WRONG = {
    NAN: "weights is not finite",
    INFINITE: "weights is not finite",
    SHAPE: "expected tensors of shapes",
    NORM: "the update moved by a norm of .*, more than .*run.max_update_norm_ratio",
    SCALED: "weights moved by a norm of .* run.max_update_median_ratio",
    RUDE: r"x\\n2026-01-01 ERROR server: all is lost\\x1b\[2J\[red\]<script>y",
    NOTHING: "expected a number of training examples, at least 1, found 0",
    HANG: f"its deadline passed|no answer within {ROUND_TIMEOUT_S} s",
}
SLOW_DATA = f"""
import time
from pathlib import Path

import numpy as np


def share(base, task):
    calls = Path(base) / "calls"
    with calls.open("a") as file:
        file.write("x")
    if len(calls.read_text()) == 2:  # the first one is for the introduction
        time.sleep({10 * ROUND_TIMEOUT_S})
    return dict(np.load(Path(base) / "data.npz"))
"""


def test_updates_that_cannot_be_used_are_left_out(found: Found) -> None:
    federation = found()
    plan = {training(number): deed for number, deed in enumerate(WRONG, 1)}
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
    boasts = dict.fromkeys(("introduction", training(1), training(2)), BOAST)
    for name in SEEN:
        planned = boasts if name == BAD else {}
        federation.tricks(name).plan({"models": KEEP_MODELS, **planned})
    server = federation.server()
    federation.clients()
    sizes = {name: federation.num_train(name) for name in SEEN}
    others = sum(sizes.values()) - sizes[BAD]
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    # As much as all others together, and no more.
    assert mean_of_round_1(federation, {**sizes, BAD: others})
    assert f"client {BAD} says that it trains on {BOASTED} examples" in server.written
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


def test_a_silent_client_holds_a_round_as_long_as_the_others_take(found: Found) -> None:
    """Not for the hour that the operator would wait at most."""
    federation = found()
    federation.tricks(BAD).plan({training(2): HANG})
    federation.server()
    federation.clients()
    submitted, run = federation.submit(
        "training.num_rounds=3", "run.federation.round_patience=1"
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [0, 1, 0]
    assert 30 < run.rounds[1]["seconds"] < 600


def test_data_that_never_come_block_nobody(found: Found) -> None:
    federation = found()
    (federation.client_folder(BAD) / "slow_data.py").write_text(SLOW_DATA)
    federation.configure(BAD, data={"name": "python", "entry": "slow_data:share"})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit(
        "training.num_rounds=2", f"run.federation.round_timeout_s={ROUND_TIMEOUT_S}"
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [1, 0]
    assert set(run.clients) == set(SEEN)
    assert "reading the data was not done within" in nodes[BAD].written
