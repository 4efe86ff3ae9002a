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
    second, same_runner = node.answer("who").split()
    assert first != second
    assert runner == same_runner


def test_a_message_is_played_in_less_than_an_import_of_torch(node: BareNode) -> None:
    node.answer("who")
    began = time.monotonic()
    node.answer("who")
    assert time.monotonic() - began < 1


def test_the_runner_has_no_thread_that_a_fork_would_lose(node: BareNode) -> None:
    assert node.answer("threads") == "1"


def test_torch_and_faiss_work_with_threads_after_the_fork(node: BareNode) -> None:
    assert node.answer("compute") == "[0, 1, 2, 3]"


def test_what_an_app_raises_is_answered_in_flowers_words(node: BareNode) -> None:
    error = _error(node, "raise")
    assert error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert error.reason == "<class 'ValueError'>:<'boom'>"


@pytest.mark.parametrize(
    ("what", "cause"),
    [
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
    assert error.code == ErrorCode.CLIENT_APP_CRASHED
    assert error.reason == f"the client's process died: {cause}"
    assert node.answer("compute") == "[0, 1, 2, 3]"


@pytest.mark.slow
def test_a_runner_that_was_killed_is_replaced() -> None:
    with bare_node() as node:
        runner = int(node.answer("who").split()[1])
        os.kill(runner, signal.SIGKILL)
        _wait_until_gone(runner)
        assert int(node.answer("who").split()[1]) != runner


def test_a_killed_runner_takes_its_child_along_and_so_does_the_nodes_end() -> None:
    with bare_node() as node:
        runner = int(node.answer("who").split()[1])
        node.send("sleep")
        child = _child_of(node, runner)
        os.kill(runner, signal.SIGKILL)
        _wait_until_gone(child)
    with bare_node() as node:
        runner = int(node.answer("who").split()[1])
        node.send("sleep")
        child = _child_of(node, runner)
        began = time.monotonic()
    assert time.monotonic() - began < 2
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
