"""What a peer sends is parsed in time that grows as its length, and no faster.

Each parser gets an input and one of four times the length. In proportion to the length
the second takes 4 times as long, by its square 16 times.
"""

import asyncio
import contextlib
import functools
import io
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from PIL import Image
from starlette.requests import Request
from starlette.types import ASGIApp
from starlette.types import Message as Event

from knnper.client.service import bodies, inputs
from knnper.client.service.app import make_service
from knnper.data.examples import InputSpec
from knnper.errors import KnnPerError, RunError
from knnper.files import parse_json
from knnper.records import Flat, unflatten
from knnper.server.link import gateway_rules, reply_rules
from knnper.strategies.core.evaluation import Validation
from knnper.transport import flower_protocol as flower
from knnper.yaml_text import parse_yaml

TIMES_AS_LONG, MOST_TIMES = 4, 9.0
LIMITS = bodies.RequestLimits()
READER = inputs.RequestReader(
    InputSpec((8, 8, 1), 3, (0.5,), (0.25,)), ("cat", "dog", "eel"), LIMITS
)
Make = Callable[[int], Any]
Parse = Callable[[Any], object]


def cpu_s(parse: Parse, made: Any) -> float:
    """Return the seconds that a parser needs, whether or not it takes the input."""
    fastest = float("inf")
    for _ in range(3):
        began = time.thread_time()
        with contextlib.suppress(KnnPerError, gateway_rules.GatewayRefusal, ValueError):
            parse(made)
        fastest = min(fastest, time.thread_time() - began)
    return fastest


def read_inputs(content_type: str, content: bytes) -> object:
    async def receive() -> Event:
        return {"type": "http.request", "body": content, "more_body": False}

    async def read() -> object:
        headers = [(b"content-type", content_type.encode())]
        request = Request({"type": "http", "headers": headers}, receive)
        async with bodies.Bodies(LIMITS).read(request) as body:
            return READER.inputs(body, _budget())

    return asyncio.run(read())


def inputs_in(content_type: str) -> Parse:
    return functools.partial(read_inputs, content_type)


def form_of_type(parameters: str) -> object:
    return read_inputs(f"{bodies.FORM}{parameters}", b"--b--")


def _budget() -> bodies.Budget:
    return bodies.Budget(LIMITS)


def jpeg_with(marker: int, payload: bytes) -> Make:
    """Return a JPEG file with a segment again and again."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "JPEG")
    begin, rest = file.getvalue()[:2], file.getvalue()[2:]
    length = (len(payload) + 2).to_bytes(2, "big")
    segment = bytes([0xFF, marker]) + length + payload
    return lambda count: begin + count * segment + rest


def png_with(kind: bytes, payload: bytes) -> Make:
    """Return a PNG file with a chunk again and again."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "PNG")
    header, rest = file.getvalue()[:33], file.getvalue()[33:]
    checksum = zlib.crc32(kind + payload).to_bytes(4, "big")
    chunk = len(payload).to_bytes(4, "big") + kind + payload + checksum
    return lambda count: header + count * chunk + rest


@functools.cache
def a_service() -> ASGIApp:
    def no_model() -> Any:
        raise RunError("there is no model")

    return make_service("site-a", no_model, tokens=None)


def answer_health(cookie: bytes) -> None:
    """Have the service answer a request with a cookie, which needs no token."""
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        **{"type": "http", "method": "GET", "path": "/health", "query_string": b""},
        "headers": [(b"host", b"localhost"), (b"cookie", cookie)],
    }
    asyncio.run(a_service()(scope, receive, send))  # type: ignore[arg-type]
    assert answers[0]["status"] == 200


SERVICE: dict[str, tuple[int, Make, Parse]] = {
    "cookie of backslashes": (
        *(4000, lambda n: b'a="' + n * b"\\" + b'"'),
        answer_health,
    ),
    "content type of semicolons": (
        *(4000, lambda n: f'; x="{n * ";"}'),
        form_of_type,
    ),
    "content type of parameters": (
        *(4000, lambda n: n * ";a=b"),
        form_of_type,
    ),
    "content type of blanks": (
        *(4000, lambda n: f"; {n * ' '};{n * 'a'}"),
        form_of_type,
    ),
    "header of a form's part": (
        500,
        lambda n: (
            b'--b\r\nContent-Disposition: form-data; name="image"\r\n'
            b"Content-Type: image/png" + n * b";a" + b"\r\n\r\nx\r\n--b--"
        ),
        inputs_in(f"{bodies.FORM}; boundary=b"),
    ),
    "parts of a form": (
        *(20_000, lambda n: b"--b" + n * b"\r\n--b" + b"--"),
        inputs_in(f"{bodies.FORM}; boundary=b"),
    ),
    "digits in JSON": (
        *(50_000, lambda n: b'{"inputs": [[[' + n * b"1" + b"]]]}"),
        inputs_in(inputs.JSON),
    ),
    "levels in JSON": (*(50_000, lambda n: n * b"["), inputs_in(inputs.JSON)),
    "wrong inputs in JSON": (
        *(5000, lambda n: b'{"inputs": [' + n * b'{"image": 3},' + b"3]}"),
        inputs_in(inputs.JSON),
    ),
    "header of an array": (
        2000,
        lambda n: b"\x93NUMPY\x02\x00" + n.to_bytes(4, "little") + n * b"(",
        inputs_in(inputs.NPY),
    ),
    "Exif data of a JPEG": (
        20_000,
        jpeg_with(0xE1, b"Exif\0\0" + 10 * b"x"),
        inputs_in("image/jpeg"),
    ),
    "profiles of a JPEG": (
        2000,
        jpeg_with(0xE2, b"ICC_PROFILE\0\1\1x"),
        inputs_in("image/jpeg"),
    ),
    "texts of a PNG": (1500, png_with(b"tEXt", b"a\0b"), inputs_in("image/png")),
}


def reply_of(tree: ObjectTree) -> PushMessagesRequest:
    metadata = Metadata(message_id=tree.object_id)
    message = Message(metadata=metadata)
    return PushMessagesRequest(messages_list=[message], message_object_trees=[tree])


def object_id(number: int) -> str:
    return f"{number:064x}"


def wide_tree(count: int) -> PushMessagesRequest:
    children = [ObjectTree(object_id=object_id(one + 1)) for one in range(count)]
    return reply_of(ObjectTree(object_id=object_id(0), children=children))


def record_of(kind: str, body: bytes) -> bytes:
    return f"{kind}  {len(body)}\0".encode() + body


def checked(content: bytes) -> None:
    reply_rules.require_decodable(content, (), Metadata())


def validation_with_tensors(count: int) -> str:
    """Return the layout of an answer with as many metrics as tensors."""
    reference = {
        **{"num_examples": 1, "num_correct": 1, "log_loss_sum": 0.5},
        **{
            f"bin_{name}": {"tuple": []} for name in ("counts", "confidence", "correct")
        },
        "metrics": {"dict": {f"m{number}": None for number in range(count)}},
    }
    fields = {
        "reference": {"record": "Evaluation", "fields": reference},
        **{"num_personal": 0, "num_personal_correct": 0, "failures": {"dict": {}}},
    }
    shapes = {f"t{number}": [0] for number in range(count)}
    structure = {"record": "Validation", "fields": fields}
    return json.dumps({"structure": structure, "shapes": shapes})


SERVER: dict[str, tuple[int, Make, Parse]] = {
    "fields of a message": (
        *(50_000, lambda n: n * b"\x0a\x02\x08\x01"),
        lambda body: gateway_rules.parsed(flower.PUSH_MESSAGES, body),
    ),
    "levels of a message": (
        *(50_000, lambda n: n * b"\x0a\x80\x01"),
        lambda body: gateway_rules.parsed(flower.PUSH_MESSAGES, body),
    ),
    "tree of a reply": (*(2000, wide_tree), reply_rules.validate_announcement),
    "levels of an object": (
        *(50_000, lambda n: record_of("RecordDict", n * b"[")),
        checked,
    ),
    "head of an object": (*(50_000, lambda n: b"Array " + n * b"," + b" 0\0"), checked),
    "metrics beside tensors": (
        500,
        validation_with_tensors,
        lambda layout: unflatten(Validation, Flat(torch.empty(0), layout)),
    ),
    "levels of JSON": (*(50_000, lambda n: n * "["), parse_json),
}
FILES: dict[str, tuple[int, Make, Parse]] = {
    "keys of YAML": (
        *(500, lambda n: "".join(f"k{one}: 1\n" for one in range(n))),
        lambda text: parse_yaml(text, "file"),
    ),
    "aliases of YAML": (
        *(500, lambda n: "- &a x\n" + n * "- *a\n"),
        lambda text: parse_yaml(text, "file"),
    ),
    "integer of YAML": (
        *(5000, lambda n: f"a: !!int 1{n * ':1'}"),
        lambda text: parse_yaml(text, "file"),
    ),
}
PARSERS = {**SERVICE, **SERVER, **FILES}


@pytest.mark.parametrize("name", PARSERS)
def test_parser_time_grows_with_input_length(name: str) -> None:
    length, make, parse = PARSERS[name]
    short, long = make(length), make(TIMES_AS_LONG * length)
    # What takes no time at all, as it is refused by its length, has no ratio.
    assert cpu_s(parse, long) < MOST_TIMES * max(cpu_s(parse, short), 1e-3)
