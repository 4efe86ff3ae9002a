"""Clients that die: the run goes on as documented, and they get the model later."""

import re

import pytest

from tests.federation.running_commands import wait_until
from tests.federation.site_tricks import (
    HOLD,
    INSTALLED,
    INSTALLING,
    KILL,
    Tricks,
    training,
)
from tests.federation.small_federation import SEEN, Example, Found

pytestmark = pytest.mark.slow
NOT_ONE_MAY_FAIL = "run.max_failed_fraction=0.0"


def test_a_process_that_is_killed_in_training_is_left_out_of_that_round(
    found: Found, example: Example
) -> None:
    federation = found()
    federation.tricks("0001").plan({training(2): KILL})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit()
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [0, 1, 0]
    assert [one["num_clients"] for one in run.rounds] == [3, 2, 3]
    assert run.results["training"]["num_failed"] == 1
    assert set(run.clients) == set(SEEN)
    reason = r"round 2: client 0001 failed: the client's process died: .*SIGKILL"
    assert re.search(reason, federation.run_log)
    assert "the process of a message died: it was ended by SIGKILL" in (
        nodes["0001"].written
    )


def test_a_round_waits_for_a_node_that_was_killed_where_none_may_fail(
    found: Found, example: Example
) -> None:
    federation = found()
    tricks = federation.tricks("0001")
    tricks.plan({training(2): HOLD})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit(NOT_ONE_MAY_FAIL)
    _wait_until_at(tricks, training(2))
    nodes["0001"].kill()
    tricks.plan({})
    federation.clients("0001")
    assert submitted.wait() == 0
    run.require_same(example.reference, SEEN)
    assert "the round is made again" in federation.run_log


def test_clients_that_are_killed_in_the_hand_over_get_the_model_later(
    found: Found, example: Example
) -> None:
    federation = found()
    federation.tricks("0001").plan({INSTALLED: KILL})
    tricks = federation.tricks("0003")
    tricks.plan({INSTALLING: HOLD})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit()
    _wait_until_at(tricks, INSTALLING)
    nodes["0003"].kill()
    assert submitted.wait() == 0
    assert set(run.clients) == {"0000"}
    assert run.results["model_distribution"]["offline"] == ["0001", "0003"]
    for name in ("0001", "0003"):
        words = f"client {name} could not personalise: "
        assert words in federation.run_log
        federation.tricks(name).plan({})
    federation.clients("0003")
    assert federation.resume(run).wait() == 0
    run.require_same(example.reference, SEEN)


def _wait_until_at(tricks: Tricks, when: str) -> None:
    wait_until(lambda: tricks.is_at(when), f"{tricks.folder.name} is at {when}")


def test_a_run_for_which_too_few_come_ends_with_an_error(found: Found) -> None:
    federation = found()
    federation.server()
    submitted, _ = federation.submit("run.federation.wait_for_clients_s=2")
    assert submitted.wait() == 1
    words = " ".join(submitted.written.split())
    assert "expected at least 1 clients within 2 s, found 0 (none). Start more" in words
