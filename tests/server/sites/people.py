"""Clients that are behind the nodes of a fake grid."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from flwr.app import Error, Message, RecordDict

from knnper.server.link.authorized import Registered
from knnper.transport.messages import Introduction, Purpose, introduction_content
from tests.server.fake_grid import FakeGrid


def roster(
    names: dict[int, str], fixed: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Registered]:
    """Return who is registered, by node."""
    return {
        str(node): Registered(name, "", "folder", fixed.get(name))
        for node, name in names.items()
    }


class People:
    """Who is behind which node; other answers than who they are may be set."""

    def __init__(self, names: dict[int, str]) -> None:
        self.said = {
            node: Introduction(name, num_train=10 * node, num_validation=2, num_test=1)
            for node, name in names.items()
        }
        self.asked: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.grid = FakeGrid(self.answer, names)

    def change(self, node: int, **said: object) -> None:
        self.said[node] = replace(self.said[node], **said)  # type: ignore[arg-type]

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        assert message.metadata.message_type == Purpose.INTRODUCE.value
        self.asked.append(node)
        said = self.said.get(node)
        if said is None:
            error = Error(code=2, reason="no such file")
            return Message(error, reply_to=message)
        return Message(introduction_content(said), reply_to=message)

    def notices(self) -> list[tuple[int, str]]:
        """Return which nodes were told that they are refused, and why."""
        told = [
            message
            for message in self.grid.messages.values()
            if message.metadata.message_type == Purpose.REFUSE.value
        ]
        return [(one.metadata.dst_node_id, _reason(one.content)) for one in told]


def _reason(content: RecordDict) -> str:
    return str(content.config_records["refusal"]["reason"])
