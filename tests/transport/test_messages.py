from pathlib import Path

import pytest
import torch

from knnper.errors import CodecError
from knnper.records import fingerprint
from knnper.strategies.core.records import ModelPayload
from knnper.transport.messages import (
    CannotPlayError,
    Job,
    Packed,
    Purpose,
    discard,
    job_of,
    pack,
    packed_of,
    to_content,
    unpack,
    unpack_shared,
    why_none_can_be_played,
)

PAYLOAD = ModelPayload(torch.linspace(-1, 1, 1000))


def test_arrays_travel_inside_the_message() -> None:
    back = unpack(ModelPayload, pack(PAYLOAD, shared_folder=None))
    assert fingerprint(back) == fingerprint(PAYLOAD)


def test_arrays_travel_as_a_file_in_memory(tmp_path: Path) -> None:
    packed = pack(PAYLOAD, tmp_path)
    assert len(packed.array) == 0
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [4000]
    assert fingerprint(unpack(ModelPayload, packed, tmp_path)) == fingerprint(PAYLOAD)
    discard(packed, tmp_path)
    pack(PAYLOAD, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "what was given back is used again"


def test_arrays_stay_in_the_message_where_memory_is_full(tmp_path: Path) -> None:
    packed = pack(PAYLOAD, tmp_path / "no-such-folder")
    assert fingerprint(unpack(ModelPayload, packed)) == fingerprint(PAYLOAD)


def test_a_file_of_another_machine_is_named(tmp_path: Path) -> None:
    packed = pack(PAYLOAD, tmp_path)
    discard(packed, tmp_path)
    with pytest.raises(CodecError, match="is not on this machine"):
        unpack(ModelPayload, packed, tmp_path)


def test_what_is_shared_is_read_once(tmp_path: Path) -> None:
    packed = pack(PAYLOAD, tmp_path)
    first = unpack_shared(ModelPayload, packed, tmp_path)
    discard(packed, tmp_path)
    assert unpack_shared(ModelPayload, packed, tmp_path) is first
    assert fingerprint(first) == fingerprint(PAYLOAD)
    again = pack(PAYLOAD, tmp_path)
    assert unpack_shared(ModelPayload, again, tmp_path) is not first
    assert fingerprint(unpack_shared(ModelPayload, pack(PAYLOAD, None))) == fingerprint(
        PAYLOAD
    )


def test_a_request_carries_job_and_records() -> None:
    job = Job(["0007"], 3, [1], '{"name": "x"}', "runs/x", "")
    content = to_content(job, {"payload": pack(PAYLOAD, None)})
    assert job_of(content) == job
    packed = packed_of(content, "payload")
    assert isinstance(packed, Packed)
    assert fingerprint(unpack(ModelPayload, packed)) == fingerprint(PAYLOAD)
    assert packed_of(content, "reference") is None


def test_what_is_wrong_with_a_process_is_found_in_what_flower_tells() -> None:
    error = CannotPlayError("there is no data in /data")
    told = f"<class 'ClientAppException'>:<'Traceback ...\n{error!r}\nKnn: {error}'>"
    reason = why_none_can_be_played(told)
    assert reason is not None
    assert reason.startswith("no client can be run on ")
    assert reason.endswith(": there is no data in /data")
    assert why_none_can_be_played("the client's weights are not finite") is None


def test_purposes_are_flower_message_types() -> None:
    assert Purpose.PERSONALIZE.value == "evaluate.personalize"
    assert Purpose.PERSONALIZE.action == "personalize"
