"""The gateway's checks of replies, with a stand-in for Flower."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.message import Message as FlowersMessage
from flwr.proto.fleet_pb2 import (
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node

from knnper.server.link.gateway_rules import AuthenticatedClient, GatewayRefusal
from knnper.server.link.replies import Replies
from knnper.transport.polling import LEAST_LIMIT_BYTES, MOST_TIMES_SENT
from tests.server.link.peers import Reply, deflated, id_of, reply_to

NODE, OTHER, RUN = 7, 8, 5
ROOT, PIECE = "ab" * 32, "cd" * 32
CALLER = AuthenticatedClient("key", b"key", "site-a", NODE, {"flwr-signature": "s"})


@dataclass
class Flower:
    """Takes replies as the SuperLink does."""

    statuses: Iterator[int] = field(default_factory=lambda: iter(()))
    messages: list[PushMessagesRequest] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["flwr-signature"] == "s"
        status = next(self.statuses, 200)
        if status != 200:
            return httpx.Response(status, json={"code": 2007, "detail": "It is over."})
        if request.url.path.endswith("push-object"):
            pushed = PushObjectRequest.FromString(request.content)
            assert pushed.session_id == "flowers"
            self.objects[pushed.object_id] = pushed.object_content
            return httpx.Response(200)
        announced = PushMessagesRequest.FromString(request.content)
        self.messages.append(announced)
        announced_ids = list(_ids(announced.message_object_trees[0]))
        response = PushMessagesResponse(
            objects_to_push=[
                object_id
                for object_id in announced_ids
                if object_id not in self.objects
            ],
            session_id="flowers",
        )
        return httpx.Response(200, content=response.SerializeToString())


def _ids(tree: ObjectTree) -> Iterator[str]:
    for child in tree.children:
        yield from _ids(child)
    yield tree.object_id


@dataclass
class Scene:
    """Two nodes, each with one message."""

    replies: Replies
    flower: Flower
    warnings: list[str]

    async def send(self, reply: Reply) -> str:
        """Announce a reply and push it; return the session."""
        session = self.announce(reply).session_id
        for name, content in reply.objects.items():
            await self.push(session, name, content)
        return session

    def announce(self, reply: Reply) -> PushMessagesResponse:
        answer = self.replies.announce(CALLER, reply.request(NODE))
        response: PushMessagesResponse = PushMessagesResponse.FromString(answer)
        return response

    async def push(self, session: str, name: str, content: bytes) -> None:
        request = PushObjectRequest(
            node=Node(node_id=NODE),
            run_id=RUN,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        passed_on = await self.replies.store(CALLER, request, len(content))
        await passed_on()

    @property
    def excuse(self) -> str:
        """The reason of the error that Flower got instead of the reply."""
        (only,) = self.flower.messages
        (message,) = only.messages_list
        assert message.metadata.src_node_id == NODE
        assert message.metadata.reply_to_message_id == ROOT
        content = self.flower.objects[message.metadata.message_id]
        assert FlowersMessage.inflate(content).has_error()
        return str(message.error.reason)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with scene_in(tmp_path) as scene:
        yield scene


@contextlib.contextmanager
def scene_in(folder: Path, quota: int | None = None) -> Iterator[Scene]:
    flower, events = Flower(), list[str]()
    behind = httpx.AsyncClient(
        base_url="http://flower", transport=httpx.MockTransport(flower.answer)
    )
    replies = Replies(behind, folder, quota, lambda *words: events.append(words[2]))
    for node_id, root in ((NODE, ROOT), (OTHER, "ef" * 32)):
        metadata = asked(node_id, root)
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=PIECE)])
        answer = PullMessagesResponse(
            messages_list=[Message(metadata=metadata)], message_object_trees=[tree]
        )
        replies.sent(node_id, answer.SerializeToString())
    yield Scene(replies, flower, events)
    replies.forget_run(RUN)


def asked(node_id: int = NODE, root: str = ROOT) -> Metadata:
    return Metadata(
        run_id=RUN,
        message_id=root,
        src_node_id=1,
        dst_node_id=node_id,
        group_id="3",
        message_type="train",
        created_at=time.time(),
        ttl=600,
    )


def honest(record: RecordDict | None = None) -> Reply:
    return reply_to(Message(metadata=asked()), record)


def arrays(size: int) -> RecordDict:
    return RecordDict({"a": ArrayRecord({"x": Array(np.arange(size, dtype=np.int64))})})


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_a_reply_reaches_flower_once_it_is_whole(scene: Scene) -> None:
    record = arrays(2_000_000)
    record["c"] = ConfigRecord({"a": 1, "b": "x", "c": [1.0, 2.0], "d": b"bytes"})
    reply = honest(record)
    assert len(reply.objects) > 4

    async def work() -> None:
        session = scene.announce(reply).session_id
        for name, content in reply.objects.items():
            assert scene.flower.messages == []
            await scene.push(session, name, content)

    done(work())
    assert [message.message_object_trees[0] for message in scene.flower.messages] == [
        reply.tree
    ]
    assert scene.flower.objects == reply.objects
    assert scene.warnings == []


def test_repeated_request_gets_the_same_answer(scene: Scene) -> None:
    reply = honest(arrays(10))

    async def work() -> None:
        session = await scene.send(reply)
        assert scene.announce(reply).session_id == session
        await scene.push(session, *list(reply.objects.items())[-1])
        reply.metadata.created_at += 0.5
        with pytest.raises(GatewayRefusal, match="answered already"):
            scene.announce(reply)

    done(work())
    assert len(scene.flower.messages) == 1


def tree(root: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=root, children=children)


def test_trees_that_are_none_are_refused(scene: Scene) -> None:
    request = honest().request(NODE)
    (right,) = request.message_object_trees
    top, piece, other = right.object_id, tree(PIECE), tree(ROOT)
    for wrong, why in (
        (tree("x"), "no SHA-256"),
        (tree(top, piece, piece), "twice below another"),
        (tree(top, tree(top)), "two kinds of children"),
        (
            tree(top, tree(PIECE, other), tree("ef" * 32, piece)),
            "two kinds of children",
        ),
        (tree(ROOT, piece), "at the root"),
    ):
        changed = PushMessagesRequest()
        changed.CopyFrom(request)
        changed.message_object_trees[0].CopyFrom(wrong)
        with pytest.raises(GatewayRefusal, match=why):
            scene.replies.announce(CALLER, changed)
    request.clientapp_runtime_list[0] = float("nan")
    with pytest.raises(GatewayRefusal, match="the client's seconds"):
        scene.replies.announce(CALLER, request)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_superlink_that_is_away_for_a_moment(fails_at: int, scene: Scene) -> None:
    scene.flower.statuses = iter([200] * fails_at + [503])
    reply = honest(arrays(10))

    async def work() -> None:
        with pytest.raises(GatewayRefusal) as refused:
            await scene.send(reply)
        assert refused.value.status == 503
        session = scene.announce(reply).session_id
        await scene.push(session, *list(reply.objects.items())[-1])

    done(work())
    assert scene.flower.objects == reply.objects


def test_end_of_a_run_is_reported_as_by_flower(scene: Scene) -> None:
    scene.flower.statuses = iter([403])
    with pytest.raises(GatewayRefusal) as refused:
        done(scene.send(honest()))
    assert (refused.value.status, refused.value.code) == (403, 2007)


CHANGES: dict[str, Callable[[Metadata], None]] = {
    "another source": lambda one: setattr(one, "src_node_id", OTHER),
    "the server": lambda one: setattr(one, "src_node_id", 1),
    "to a client": lambda one: setattr(one, "dst_node_id", OTHER),
    "to another's message": lambda one: setattr(one, "reply_to_message_id", "ef" * 32),
    "to no message": lambda one: setattr(one, "reply_to_message_id", "01" * 32),
    "another run": lambda one: setattr(one, "run_id", RUN + 1),
    "another kind": lambda one: setattr(one, "message_type", "evaluate"),
    "another round": lambda one: setattr(one, "group_id", "4"),
    "no time": lambda one: setattr(one, "ttl", float("nan")),
    "for ever": lambda one: setattr(one, "ttl", 1e9),
    "before all time": lambda one: setattr(one, "created_at", -1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_are_not_those_of_an_answer(change: str, scene: Scene) -> None:
    reply = honest()
    CHANGES[change](reply.metadata)
    with pytest.raises(GatewayRefusal) as refused:
        scene.announce(reply)
    assert 400 <= refused.value.status < 500
    # The client may still answer.
    done(scene.send(honest()))
    assert len(scene.flower.messages) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_the_messages_own_object_says_the_same(change: str, scene: Scene) -> None:
    """The run reads this one, not what was announced."""
    reply = honest()
    claimed = Metadata()
    claimed.CopyFrom(reply.metadata)
    CHANGES[change](claimed)
    with pytest.raises(GatewayRefusal):
        done(scene.send(dataclasses.replace(reply, claimed=claimed)))
    assert "refused" in scene.excuse


def with_inside(**contents: bytes) -> Reply:
    """Return a reply with one object below its content, that is not what it should."""
    (inside,) = contents.values()
    record = deflated(
        "RecordDict", json.dumps({"a": id_of(inside)}).encode(), (id_of(inside),)
    )
    tree = ObjectTree(
        object_id=id_of(record), children=[ObjectTree(object_id=id_of(inside))]
    )
    objects = {id_of(inside): inside, id_of(record): record}
    return dataclasses.replace(honest(), objects_inside=objects, tree_inside=tree)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no head",
        b"ArrayChunk  5\0four",
        b"ArrayChunk  -1\0",
        b"Pickle  4\0four",
        b"\xff\xfe\0",
        deflated("ConfigRecord", b"\x0a\xff\xff"),
        deflated("ConfigRecord", bytes(1_000_001)),
        deflated("ArrayRecord", b"[" * 100_000),
        deflated("ArrayRecord", b"[]"),
        deflated("ArrayRecord", b'{"a": "b"}'),
        deflated("Array", b'{"arraychunk_ids": [0]}'),
        deflated("Array", b'{"arraychunk_ids": "0"}'),
        deflated("Array", b"{}"),
        deflated("ArrayChunk", b"", (PIECE,)),
        deflated("Message", b""),
    ],
    ids=range(16),
)
def test_objects_that_no_run_could_read(content: bytes, scene: Scene) -> None:
    with pytest.raises(GatewayRefusal):
        done(scene.send(with_inside(a=content)))
    assert "refused" in scene.excuse


def test_a_small_reply_does_not_become_a_large_one(scene: Scene) -> None:
    chunk = deflated("ArrayChunk", bytes(1_000_000))
    body = json.dumps({"arraychunk_ids": [0] * 100}).encode()
    array = deflated("Array", body, (id_of(chunk),))
    record = deflated(
        "ArrayRecord", json.dumps({"x": id_of(array)}).encode(), (id_of(array),)
    )
    top = deflated(
        "RecordDict", json.dumps({"a": id_of(record)}).encode(), (id_of(record),)
    )
    contents, tree = [chunk, array, record, top], None
    for content in contents:
        tree = ObjectTree(
            object_id=id_of(content), children=[] if tree is None else [tree]
        )
    objects = {id_of(content): content for content in contents}
    assert tree is not None
    bomb = dataclasses.replace(honest(), objects_inside=objects, tree_inside=tree)
    with pytest.raises(GatewayRefusal, match="quota"):
        done(scene.send(bomb))
    assert "many places" in scene.excuse


def test_objects_are_those_of_this_clients_reply(scene: Scene) -> None:
    reply = honest(arrays(10))

    async def work() -> None:
        session = scene.announce(reply).session_id
        name, content = next(iter(reply.objects.items()))
        for wrong in (("other", name), (session, "ef" * 32), ("", name)):
            with pytest.raises(GatewayRefusal):
                await scene.push(*wrong, content)
        assert scene.flower.messages == []
        with pytest.raises(GatewayRefusal, match="does not match its id"):
            await scene.push(session, name, content + b"more")

    done(work())
    assert "does not match its id" in scene.excuse


def test_a_reply_is_as_large_as_what_it_answers_allows(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LEAST_LIMIT_BYTES > 1000
    monkeypatch.setattr("knnper.server.link.replies.LEAST_LIMIT_BYTES", 1000)
    with pytest.raises(GatewayRefusal, match="quota"):
        done(scene.send(honest(arrays(1000))))
    assert "quota" in scene.excuse
    with scene_in(tmp_path) as larger:
        larger.replies.require_object(NODE, RUN, PIECE)(10_000 // MOST_TIMES_SENT + 1)
        done(larger.send(honest(arrays(1000))))
        assert larger.warnings == []


def test_a_quota_holds_for_all_replies_of_a_run(tmp_path: Path) -> None:
    with scene_in(tmp_path, quota=20_000) as scene:
        done(scene.send(honest(arrays(1000))))
        second = "12" * 32
        answer = PullMessagesResponse(
            messages_list=[Message(metadata=asked(root=second))],
            message_object_trees=[ObjectTree(object_id=second)],
        )
        scene.replies.sent(NODE, answer.SerializeToString())
        scene.flower.messages.clear()
        with pytest.raises(GatewayRefusal, match="max_upload_mb"):
            done(
                scene.send(reply_to(Message(metadata=asked(root=second)), arrays(2000)))
            )
        scene.replies.forget_run(RUN)
        scene.replies.sent(NODE, answer.SerializeToString())
        done(scene.send(reply_to(Message(metadata=asked(root=second)), arrays(2000))))


def test_a_reply_of_which_nothing_more_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.replies._TIDY_S", 0.01)
    monkeypatch.setattr("knnper.server.link.replies._STALLED_S", 0.1)

    async def work() -> None:
        scene.announce(honest())
        tidying = asyncio.create_task(scene.replies.keep_tidy())
        while not scene.flower.objects:
            await asyncio.sleep(0.01)
        tidying.cancel()

    done(work())
    assert "does not continue" in scene.excuse


def test_nothing_is_kept_of_what_is_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.server.link.replies._TIDY_S", 0.01)
    monkeypatch.setattr("knnper.server.link.replies._KEPT_S", 0.05)

    async def work() -> None:
        await scene.send(honest())
        tidying = asyncio.create_task(scene.replies.keep_tidy())
        while scene.replies._sent.get(NODE):
            await asyncio.sleep(0.01)
        tidying.cancel()

    done(work())
    with pytest.raises(GatewayRefusal):
        scene.announce(honest())
    scene.replies.forget_run(RUN)
    assert scene.replies._sent == {}
    assert not scene.replies._used


@pytest.mark.parametrize(
    ("node_id", "run_id", "name"),
    [(OTHER, RUN, ROOT), (NODE, RUN + 1, ROOT), (NODE, RUN, "ef" * 32), (9, RUN, ROOT)],
)
def test_requests_for_messages_of_others_are_refused(
    node_id: int, run_id: int, name: str, scene: Scene
) -> None:
    with pytest.raises(GatewayRefusal):
        scene.replies.require_object(node_id, run_id, name)
    with pytest.raises(GatewayRefusal):
        scene.replies.require_message(node_id, run_id, name)
    if node_id == 9 or run_id != RUN:
        with pytest.raises(GatewayRefusal):
            scene.replies.require_run(node_id, run_id)
