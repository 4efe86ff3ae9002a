"""A process for each message, forked from a runner: its answers and its deaths."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.nodestate import NodeState

from knnper.client.flower_node import make_state, serve_runtime_api
from knnper.client.runner import RunnerOptions, RunnerProcess, start_runner
from knnper.errors import RunError

APP = "misbehaving_app:app"
RUN = 7
NODE = 11
FAR_TOO_LONG_S = 30.0
SECRET = b"of the runner"


class BareNode:
    """Hands messages to a runner and waits for the replies."""

    def __init__(self, state: NodeState, runner: RunnerProcess) -> None:
        self.state = state
        self.runner = runner

    def ask(self, command: str) -> Message:
        """Return the reply to a message that tells the app what to do."""
        self.send(command)
        end = time.monotonic() + FAR_TOO_LONG_S
        while time.monotonic() < end:
            self.runner.wake()
            replies = self.state.get_messages_legacy(is_reply=True)
            if replies:
                return self._with_content(replies[0])
            time.sleep(0.01)
        raise TimeoutError(f"no reply to {command!r}")

    def answer(self, command: str) -> str:
        """Return what the app answers."""
        return str(self.ask(command).content.config_records["answer"]["is"])

    def send(self, command: str) -> None:
        content = RecordDict({"do": ConfigRecord({"what": command})})
        message = Message(content, dst_node_id=NODE, message_type="train")
        self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN)
        main_loop._insert_message(message, self.state, self.state.object_store)

    def _with_content(self, message: Message) -> Message:
        store = self.state.object_store
        tree = store.get_object_tree(message.metadata.message_id)
        contents: dict[str, bytes] = {}
        for object_id in iterate_object_tree(tree):
            while not (content := store.get(object_id.object_id)):
                time.sleep(0.005)
            contents[object_id.object_id] = content
        whole: Any = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(whole, Message)
        return whole


@contextlib.contextmanager
def bare_node(app: str = APP) -> Iterator[BareNode]:
    factory = make_state()
    state = factory.state()
    _prepare(state)
    folder = str(Path(__file__).parent)
    with (
        mock.patch.dict(os.environ, PYTHONPATH=folder, OMP_NUM_THREADS="2"),
        serve_runtime_api(factory, SECRET) as address,
        start_runner(RunnerOptions(address, SECRET.hex(), os.getpid(), app)) as runner,
    ):
        runner.wait_until_ready()
        yield BareNode(state, runner)


def _prepare(state: NodeState) -> None:
    """Let the node know a run, as it does with the first message of one."""
    TaskIdentity.run_id = RUN
    TaskIdentity.node_id = 1
    TaskIdentity.task_id = 1
    run = Run.create_empty(RUN)
    run.fab_hash = state.store_fab(Fab("", b"no app that anyone could load", {}))
    state.store_run(run)
    state.set_node_id(NODE)
    context = Context(RUN, NODE, {"config": "/client.yaml"}, RecordDict(), {})
    state.set_run_series_context(run.series_id, context)


pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not Path("/proc").exists(), reason="looks at processes in /proc"
    ),
]


@pytest.fixture(scope="module")
def node() -> Iterator[BareNode]:
    with bare_node() as opened:
        yield opened


def _error(node: BareNode, command: str) -> Error:
    reply = node.ask(command)
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
    ("command", "cause"),
    [
        ("raise", "the client failed unexpectedly with ValueError (internal_error)"),
        ("exit", "it ended with exit status 3"),
        ("leave", "it ended with exit status 1"),
        ("kill", "it was ended by SIGKILL, perhaps for lack of memory"),
        ("hang", "its deadline passed"),
        ("hang in C", "its deadline passed"),
    ],
)
def test_a_death_is_answered_at_once_and_the_next_message_played(
    node: BareNode, command: str, cause: str
) -> None:
    began = time.monotonic()
    error = _error(node, command)
    assert time.monotonic() - began < 10  # Flower itself: 60
    code, reason = ErrorCode.CLIENT_APP_CRASHED, f"the client's process died: {cause}"
    if command == "raise":
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        reason = f"{cause}; the client's own log has the details"
    assert (error.code, error.reason) == (code, reason)
    assert node.answer("compute") == "[0, 1, 2, 3]"


@pytest.mark.slow
def test_killed_runner_ends_the_stay_of_its_node() -> None:
    with bare_node() as node:
        runner = int(node.answer("who").split()[1])
        os.kill(runner, signal.SIGKILL)
        _wait_until_gone(runner)
        with pytest.raises(RunError, match="the runner ended with exit status -9"):
            node.runner.wake()


@pytest.mark.slow
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
