"""Clients that send nonsense, or nothing: left out of the round, named and counted."""

import re

import pytest

from tests.federation.site_tricks import (
    HANG,
    INFINITE,
    NAN,
    NORM,
    NOTHING,
    SHAPE,
    training,
)
from tests.federation.small_federation import SEEN, Found

pytestmark = pytest.mark.slow

# The client with most examples, whose update is looked at first.
BAD = "0003"
ROUND_TIMEOUT_S = 25
WRONG = {
    NAN: "weights is not finite",
    INFINITE: "weights is not finite",
    SHAPE: "expected tensors of shapes",
    NORM: "the update's norm is .*, more than .*run.max_update_norm_ratio",
    NOTHING: "expected at least one training example, found 0",
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
    federation.server()
    federation.clients()
    num_rounds = len(WRONG) + 1
    submitted, run = federation.submit(
        f"training.num_rounds={num_rounds}",
        f"run.federation.round_timeout_s={ROUND_TIMEOUT_S}",
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [*[1] * len(WRONG), 0]
    assert [one["num_clients"] for one in run.rounds] == [*[2] * len(WRONG), 3]
    log = federation.run_log
    for number, reason in enumerate(WRONG.values(), 1):
        words = rf"round {number}: client {BAD} failed: .*({reason})"
        assert re.search(words, log), words
    assert set(run.clients) == set(SEEN), "it gets the model all the same"


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
