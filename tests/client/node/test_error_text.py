"""Flower's words for an error do not say where a site's folders are."""

from client.node.flower_task import _as_reply
from knnper.config.errors import DataError


def test_an_error_leaves_without_folders() -> None:
    reply = _as_reply(DataError("'/home/site/patients/x.png' cannot be read"))
    assert reply.reason == (
        "<class 'knnper.config.errors.DataError'>:<''x.png' cannot be read'>"
    )
