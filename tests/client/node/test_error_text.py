"""Flower's words for an error do not say where a site's folders are."""

from knnper.client.flower_node import _as_reply
from knnper.errors import DataError


def test_an_error_leaves_without_folders() -> None:
    reply = _as_reply(DataError("'/home/site/patients/x.png' cannot be read"))
    assert reply.reason == (
        "<class 'knnper.errors.DataError'>:<''x.png' cannot be read'>"
    )
