"""A Flower grid of functions."""

from collections.abc import Callable, Iterable

import pytest
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made by a process that takes part in a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


Answer = Callable[[Message], Message | None]


class FakeGrid:
    """Answers each message when it is looked for the second time."""

    def __init__(self, answer: Answer, nodes: Iterable[int] = ()) -> None:
        self.answer = answer
        self.nodes = set(nodes)
        self.messages: dict[str, Message] = {}
        self.looked_for: set[str] = set()
        self.num_answered = 0

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.messages)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.messages[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        requested = list(message_ids)
        ready = [
            message_id for message_id in requested if message_id in self.looked_for
        ]
        self.looked_for.update(requested)
        self.num_answered += len(ready)
        replies = [self.answer(self.messages[message_id]) for message_id in ready]
        return [reply for reply in replies if reply is not None]
