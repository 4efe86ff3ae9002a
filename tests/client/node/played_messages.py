"""A node without a server: a Runtime API and a runner, asked directly."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.nodestate import NodeState

from knnper.client import flower_node as flower_supernode
from knnper.client.flower_node import Orders, RunnerProcess, runtime_api, started

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

    def ask(self, what: str) -> Message:
        """Return the reply to a message that tells the app what to do."""
        self.send(what)
        end = time.monotonic() + FAR_TOO_LONG_S
        while time.monotonic() < end:
            self.runner.wake()
            replies = self.state.get_messages_legacy(is_reply=True)
            if replies:
                return self._with_content(replies[0])
            time.sleep(0.01)
        raise TimeoutError(f"no reply to {what!r}")

    def answer(self, what: str) -> str:
        """Return what the app answers."""
        return str(self.ask(what).content.config_records["answer"]["is"])

    def send(self, what: str) -> None:
        content = RecordDict({"do": ConfigRecord({"what": what})})
        message = Message(content, dst_node_id=NODE, message_type="train")
        self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN)
        main_loop._insert_message(message, self.state, self.state.object_store)

    def _with_content(self, message: Message) -> Message:
        store = self.state.object_store
        tree = store.get_object_tree(message.metadata.message_id)
        contents: dict[str, bytes] = {}
        for one in iterate_object_tree(tree):
            while not (content := store.get(one.object_id)):
                time.sleep(0.005)
            contents[one.object_id] = content
        whole: Any = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(whole, Message)
        return whole


@contextlib.contextmanager
def bare_node(app: str = APP) -> Iterator[BareNode]:
    factory = flower_supernode.new_state()
    state = factory.state()
    _prepare(state)
    here = str(Path(__file__).parent)
    with (
        mock.patch.dict(os.environ, PYTHONPATH=here),
        runtime_api(factory, SECRET) as address,
        started(Orders(address, SECRET.hex(), os.getpid(), app)) as runner,
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
