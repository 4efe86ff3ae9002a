"""What is sent and is no input, and what is said of it."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.client.service.small_service import (
    JSON,
    LIMITS,
    NPY,
    PNG,
    npy,
    png,
    post,
    refused,
    some_inputs,
)


def picture(mode: str, size: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (size, size)).save(file, kind)
    return file.getvalue()


OTHER_FORMATS = ("GIF", "TIFF", "WEBP", "BMP")
FORM = "multipart/form-data; boundary=x"
DIGIT = np.zeros((8, 8, 1), np.uint8)
NO_INPUTS: list[tuple[str, bytes, int, str]] = [
    (JSON, b"{", 400, "JSON"),
    (JSON, b'{"inputs": [NaN]}', 422, "inputs.0"),
    (JSON, b"[" * 900, 400, "JSON"),
    (JSON, b"{}", 422, "inputs"),
    (JSON, b'{"inputs": []}', 422, "at least 1"),
    (JSON, b'{"inputs": [1]}', 422, "inputs.0"),
    (JSON, b'{"inputs": [{"image": "%"}]}', 422, "base64"),
    (JSON, b'{"inputs": [{"image": "aGFsbG8="}]}', 422, "PNG or JPEG"),
    (JSON, b'{"inputs": [{"image": "", "more": 1}]}', 422, "inputs.0.more"),
    (JSON, b'{"inputs": [1, 1, 1, 1, 1]}', 422, "inputs"),
    (JSON, b'{"inputs": [], "more": 1}', 422, "more"),
    (JSON, b'{"inputs": [' + b"9" * 15_000 + b"]}", 400, "JSON"),
    # Too many values are refused before they are parsed.
    (JSON, b'{"inputs": [' + 1000 * b"[]," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b"{}," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b"0," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b'"",' + b"0]}", 413, "values"),
    (NPY, b"hello", 400, "numpy.save"),
    (NPY, npy(DIGIT)[:-1], 400, "cut short"),
    (NPY, npy(DIGIT) + b"x", 400, "more follows"),
    (NPY, npy(DIGIT.astype(np.int64)), 422, "uint8"),
    (NPY, npy(np.zeros((8, 9, 1), np.uint8)), 422, "(8, 8, 1)"),
    (NPY, npy(np.array([{"a": 1}], object)), 422, "object"),
    (NPY, npy(np.zeros((5, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    (NPY, npy(np.zeros((0, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    *((PNG, png(some_inputs(1)[0])[:cut], 422, "PNG") for cut in (8, 40, 60)),
    *((PNG, picture("RGB", 20, kind), 422, "PNG") for kind in OTHER_FORMATS),
    (PNG, picture("1", 9000), 413, "9000x9000"),
    # Pixels of 16 bits are not cut off.
    (PNG, picture("I;16", 8), 422, "expected 8-bit; scale them to 0-255"),
    *((kind, b"{}", 415, "application/json") for kind in ("a/b/c", "", "image/gif")),
    *((kind, b"{}", 415, "application/json") for kind in ("text/plain", "json")),
    ("multipart/form-data", b"", 400, "boundary"),
    (FORM, b"", 400, "parts"),
    (FORM, b"--x\r\nno headers\r\n--x--", 400, "blank line"),
    (FORM, b"--x\r\n\r\n--x", 400, "parts"),
    (JSON, b" " * 20_001, 413, "more than 20000 bytes"),
]


@pytest.mark.parametrize(("kind", "body", "status", "words"), NO_INPUTS)
def test_what_is_no_input_is_refused(
    client: httpx.Client, kind: str, body: bytes, status: int, words: str
) -> None:
    assert kind != PNG or len(body) < LIMITS.max_request_bytes
    refused(post(client, body, kind), status, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((256, "255"), (-1, "0"), (True, "bool"), ("1", "str"), (None, "NoneType")),
        *((10**400, "finite"), (1.5, "1.5"), (2.6e-42, "2.6e-42")),
        (254.999999999, "255"),
    ],
)
def test_a_pixel_that_is_none_is_refused(
    client: httpx.Client, value: Any, words: str
) -> None:
    pixels = some_inputs(1)[0].tolist()
    pixels[3][4] = [value]
    answer = client.post("/predict", json={"inputs": [pixels]})
    refused(answer, 422, words)
    # Whether numbers are whole is looked at in all of them at once.
    place = "whole" if isinstance(value, float) else "inputs.0.3.4.0"
    refused(answer, 422, place)


def test_a_header_that_claims_any_size_is_refused(client: httpx.Client) -> None:
    content = bytearray(png(some_inputs(1)[0]))
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    answer = post(client, bytes(content), PNG)
    refused(answer, 413, "too large")


def test_all_images_of_a_request_are_counted(client: httpx.Client) -> None:
    parts = [("image", ("a.png", picture("1", 20), "image/png"))] * 3
    assert client.post("/predict", files=parts[:2]).status_code == 200
    refused(client.post("/predict", files=parts), 413, "1000")


def test_a_jpeg_that_says_nothing_many_times_is_refused(client: httpx.Client) -> None:
    """Each of its scans has some bytes, and goes over all pixels."""
    file = io.BytesIO()
    Image.new("L", (24, 24), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    assert post(client, content, "image/jpeg").status_code == 200
    scan = content[content.rindex(b"\xff\xda") : -2]
    many = content[:-2] + 100 * scan + content[-2:]
    refused(post(client, many, "image/jpeg"), 413, "times")


def test_a_form_with_other_fields_is_refused(client: httpx.Client) -> None:
    files = {"file": ("a.png", png(some_inputs(1)[0]), "image/png")}
    refused(client.post("/predict", files=files), 422, "'file'")


def test_a_body_without_a_length_that_is_too_large_is_refused(
    client: httpx.Client,
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(21):
            yield b" " * 1000

    refused(post(client, chunks(), JSON), 413, "more than 20000 bytes")
