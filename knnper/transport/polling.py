"""Replies from a Flower grid as a stream, in the order in which they were asked for."""

import threading
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.config.errors import RunError

POLL_INTERVAL_S = 0.01


class Interrupted(RunError):
    """The run was told to stop."""


def replies_in_order(
    grid: Grid, messages: Iterable[Message], stop: threading.Event
) -> Iterator[Message]:
    """Send ``messages`` and yield their replies in the order of the messages.

    Messages are made and pushed one at a time, and a reply is dropped as soon as it
    was yielded, so that no more than the replies that overtook another are held.

    Raises
    ------
    Interrupted
        If ``stop`` is set while replies are missing.
    """
    order = [_push(grid, message) for message in messages]
    waiting, arrived = set(order), dict[str, Message]()
    for message_id in order:
        while message_id not in arrived:
            if stop.is_set():
                raise Interrupted("stopped while clients were working")
            for reply in grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                arrived[reply.metadata.reply_to_message_id] = reply
            if message_id not in arrived:
                time.sleep(POLL_INTERVAL_S)
        yield arrived.pop(message_id)


def _push(grid: Grid, message: Message) -> str:
    pushed = list(grid.push_messages([message]))
    if len(pushed) != 1 or not pushed[0]:
        raise RunError(
            "Flower did not accept a message; the run was stopped or the node is gone"
        )
    return pushed[0]
