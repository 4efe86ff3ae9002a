import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Error
from flwr.common.constant import ErrorCode

from knnper.client.flower_node import why
from knnper.errors import RunError
from tests.client.node.played_messages import BareNode, bare_node

pytestmark = pytest.mark.skipif(
    not Path("/proc").exists(), reason="looks at processes in /proc"
)


@pytest.fixture(scope="module")
def node() -> Iterator[BareNode]:
    with bare_node() as one:
        yield one


def _error(node: BareNode, what: str) -> Error:
    reply = node.ask(what)
    assert reply.has_error()
    return reply.error


def test_every_message_has_a_process_of_its_own_forked_from_one_runner(
    node: BareNode,
) -> None:
    first, runner = node.answer("who").split()
    began = time.monotonic()
    second, same_runner = node.answer("who").split()
    assert time.monotonic() - began < 1, "less than an import of torch"
    assert first != second
    assert runner == same_runner
    assert node.answer("threads") == "1", "a fork would lose another"
    # With threads after the fork.
    assert node.answer("compute") == "[0, 1, 2, 3]"


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raise", "boom"),
        ("exit", "it ended with exit status 3"),
        ("leave", "it ended with exit status 1"),
        ("kill", "it was ended by SIGKILL, perhaps for lack of memory"),
        ("hang", "its deadline passed"),
        ("hang in C", "its deadline passed"),
    ],
)
def test_a_death_is_answered_at_once_and_the_next_message_played(
    node: BareNode, what: str, cause: str
) -> None:
    began = time.monotonic()
    error = _error(node, what)
    assert time.monotonic() - began < 10  # Flower itself: 60
    code, reason = ErrorCode.CLIENT_APP_CRASHED, f"the client's process died: {cause}"
    if what == "raise":
        code, reason = (
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            "<class 'ValueError'>:<'boom'>",
        )
    assert (error.code, error.reason) == (code, reason)
    assert node.answer("compute") == "[0, 1, 2, 3]"


@pytest.mark.slow
def test_a_runner_that_was_killed_is_replaced() -> None:
    with bare_node() as node:
        runner = int(node.answer("who").split()[1])
        os.kill(runner, signal.SIGKILL)
        _wait_until_gone(runner)
        assert int(node.answer("who").split()[1]) != runner


def test_a_killed_runner_takes_its_child_along_and_so_does_the_nodes_end() -> None:
    for is_killed in (True, False):
        with bare_node() as node:
            runner = int(node.answer("who").split()[1])
            node.send("sleep")
            child = _child_of(node, runner)
            if is_killed:
                os.kill(runner, signal.SIGKILL)
                _wait_until_gone(child)
            began = time.monotonic()
        assert is_killed or time.monotonic() - began < 2
        _wait_until_gone(child)


@pytest.mark.slow
def test_a_runner_without_an_app_says_so() -> None:
    with pytest.raises(RunError, match="before it had loaded misbehaving_app:nothing"):
        bare_node("misbehaving_app:nothing").__enter__()


def test_causes_of_death() -> None:
    assert why(0) is None
    assert why(signal.SIGALRM) == "its deadline passed"
    assert why(signal.SIGSEGV) == "it was ended by SIGSEGV"


def _child_of(node: BareNode, runner: int) -> int:
    children = Path(f"/proc/{runner}/task/{runner}/children")
    while not children.read_text():
        node.runner.wake()
        time.sleep(0.01)
    return int(children.read_text())


def _wait_until_gone(process: int) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        status = Path(f"/proc/{process}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} lives on")
