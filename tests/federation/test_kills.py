"""Clients and servers that die: the run goes on as documented, or is resumed."""

import os
import re
import signal

import pytest

from tests.federation import site_tricks as trick
from tests.federation.small_federation import SEEN, Example, Federation, Found, Run
from tests.processes import Commands, Running, wait_until

pytestmark = pytest.mark.slow

NOT_ONE_MAY_FAIL = "run.max_failed_fraction=0.0"


def test_a_process_that_is_killed_in_training_is_left_out_of_that_round(
    found: Found, example: Example
) -> None:
    federation = found()
    federation.tricks("0001").plan({trick.training(2): trick.KILL})
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
    tricks.plan({trick.training(2): trick.HOLD})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit(NOT_ONE_MAY_FAIL)
    _wait_until_at(tricks, trick.training(2))
    nodes["0001"].kill()
    tricks.plan({})
    federation.clients("0001")
    assert submitted.wait() == 0
    run.require_same(example.reference, SEEN)
    assert "the round is repeated" in federation.run_log


def test_clients_that_are_killed_in_the_hand_over_get_the_model_later(
    found: Found, example: Example
) -> None:
    federation = found()
    federation.tricks("0001").plan({trick.INSTALLED: trick.KILL})
    tricks = federation.tricks("0003")
    tricks.plan({trick.INSTALLING: trick.HOLD})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit()
    _wait_until_at(tricks, trick.INSTALLING)
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


def _wait_until_at(tricks: trick.Tricks, when: str) -> None:
    wait_until(lambda: tricks.is_at(when), f"{tricks.folder.name} is at {when}")


SERVER_APP, SUPERLINK = "flwr-serverapp", "flower-superlink"


def test_server_app_killed_between_rounds(
    found: Found, example: Example, commands: Commands
) -> None:
    federation = found()
    federation.server()
    submitted, run = _in_round_2(federation, "run.max_failed_fraction=0.0")
    nodes = commands.processes("fed client").items()
    (node,) = (pid for pid, words in nodes if "/0003/" in words)
    os.kill(node, signal.SIGTERM)
    wait_until(
        lambda: "the round is repeated" in federation.run_log,
        "the server waits for a client",
    )
    os.kill(commands.the_process(SERVER_APP), signal.SIGKILL)
    federation.tricks("0003").plan({})
    federation.clients("0003")
    _require_resumed(federation, submitted, run, example)


def test_superlink_killed_within_a_round(
    found: Found, example: Example, commands: Commands
) -> None:
    federation = found()
    server = federation.server()
    submitted, run = _in_round_2(federation)
    os.kill(commands.the_process(SUPERLINK), signal.SIGKILL)
    server.wait_for("Flower's SuperLink ended with status -9; a run in progress has")
    assert server.wait() == 1
    _let_go(federation)
    federation.server()
    _require_resumed(federation, submitted, run, example)


def test_whole_server_killed_within_a_round(
    found: Found, example: Example, commands: Commands
) -> None:
    federation = found()
    server = federation.server()
    submitted, run = _in_round_2(federation)
    server.kill()
    for name in (SUPERLINK, SERVER_APP):
        wait_until(lambda: not commands.processes(name), f"{name} has ended")  # noqa: B023
    _let_go(federation)
    federation.server()
    _require_resumed(federation, submitted, run, example)


def _in_round_2(federation: Federation, *changes: str) -> tuple[Running, Run]:
    """Start clients and a run; return when a client holds in the second round."""
    tricks = federation.tricks("0003")
    tricks.plan({trick.training(2): trick.HOLD})
    federation.clients()
    submitted, run = federation.submit(*changes)
    wait_until(lambda: tricks.is_at(trick.training(2)), "0003 trains in round 2")
    assert len(run.rounds) == 1
    return submitted, run


def _let_go(federation: Federation) -> None:
    tricks = federation.tricks("0003")
    tricks.plan({})
    tricks.let_go(trick.training(2))


def _require_resumed(
    federation: Federation, submitted: Running, run: Run, example: Example
) -> None:
    """The first run failed and says how to go on; that leads to the same as serial."""
    assert submitted.wait() == 1
    words = " ".join(submitted.written.split())
    resume = f"knnper fed submit {federation.server_file} --resume {run.folder}"
    assert resume in words
    assert federation.resume(run).wait() == 0
    run.require_same(example.reference, SEEN)
    assert [one["num_failed"] for one in run.rounds] == [0, 0, 0]
