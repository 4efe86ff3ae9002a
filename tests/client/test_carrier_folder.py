"""Which files a request may name, and where a reply may be left."""

from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from knnper.client.app import _record, _reply
from knnper.client.site import SiteNode
from knnper.errors import CodecError
from knnper.simulation.flower_engine import VirtualHost
from knnper.strategies.core.records import ModelPayload
from knnper.transport.messages import Job, pack, to_content

PAYLOAD = ModelPayload(torch.ones(2))
OURS = "/dev/shm/knnper-12-0123abcd"


def job(folder: str) -> Job:
    return Job(["a"], 1, [0], "{}", shared_folder=folder)


def context() -> Context:
    return Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}
    )


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (OURS, Path(OURS)),
        ("", None),
        ("/dev/shm", None),
        ("/dev/shm/other", None),
        (f"{OURS}/x", None),
        ("/etc/knnper-12-0123abcd", None),
        ("/dev/shm/x/../knnper-12-0123abcd", None),
    ],
)
def test_a_simulation_has_one_folder_in_memory(
    folder: str, allowed: Path | None
) -> None:
    assert VirtualHost().carrier_folder(context(), job(folder)) == allowed
    assert SiteNode().carrier_folder(context(), job(folder)) is None


def test_a_site_reads_no_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    packed = pack(PAYLOAD, tmp_path)
    before = list(tmp_path.iterdir())
    message = Message(
        to_content(job(str(tmp_path)), {"payload": packed}),
        dst_node_id=1,
        message_type="train",
    )
    with pytest.raises(CodecError, match="names the file"):
        _record(message, "payload", ModelPayload, None)
    reply = _reply(message, PAYLOAD, None)
    assert list(tmp_path.iterdir()) == before
    assert "file" not in reply.content.config_records["reply.entry"]
