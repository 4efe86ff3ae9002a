"""Servers that die: a resumed run ends with the weights that it would have had."""

import os
import signal

import pytest

from tests.federation.running_commands import Commands, Running, wait_until
from tests.federation.site_tricks import HOLD, training
from tests.federation.small_federation import SEEN, Example, Federation, Found, Run

pytestmark = pytest.mark.slow
SERVER_APP, SUPERLINK = "flwr-serverapp", "flower-superlink"


def test_server_app_killed_within_a_round(
    found: Found, example: Example, commands: Commands
) -> None:
    federation = found()
    federation.server()
    submitted, run = _in_round_2(federation)
    os.kill(commands.the_process(SERVER_APP), signal.SIGKILL)
    _let_go(federation)
    _require_resumed(federation, submitted, run, example)


def test_server_app_killed_between_rounds(
    found: Found, example: Example, commands: Commands
) -> None:
    federation = found()
    federation.server()
    submitted, run = _in_round_2(federation, "run.max_failed_fraction=0.0")
    (node,) = (pid for pid, words in _nodes(commands).items() if "/0003/" in words)
    os.kill(node, signal.SIGTERM)
    wait_until(
        lambda: "the round is made again" in federation.run_log,
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
    server.wait_for("Flower's SuperLink runs again; registrations are kept")
    _let_go(federation)
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
    tricks.plan({training(2): HOLD})
    federation.clients()
    submitted, run = federation.submit(*changes)
    wait_until(lambda: tricks.is_at(training(2)), "0003 trains in round 2")
    assert len(run.rounds) == 1
    return submitted, run


def _let_go(federation: Federation) -> None:
    tricks = federation.tricks("0003")
    tricks.plan({})
    tricks.let_go(training(2))


def _nodes(commands: Commands) -> dict[int, str]:
    return commands.processes("fed client")


def _require_resumed(
    federation: Federation, submitted: Running, run: Run, example: Example
) -> None:
    """The first run failed and says how to go on; that leads to the same as serial."""
    assert submitted.wait() == 1
    words = " ".join(submitted.written.split())
    assert f"knnper fed submit --resume {run.folder}" in words
    assert federation.resume(run).wait() == 0
    run.require_same(example.reference, SEEN)
    assert [one["num_failed"] for one in run.rounds] == [0, 0, 0]
