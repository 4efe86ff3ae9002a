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

from tests.client.service.small_service import some_inputs
from tests.client.service.some_requests import (
    JSON,
    LIMITS,
    NPY,
    PNG,
    npy,
    png,
    post,
    refused,
)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b'{"inputs": [NaN]}', 422, "inputs.0"),
        (b"[" * 900, 400, "JSON"),
        (b"{}", 422, "inputs"),
        (b'{"inputs": []}', 422, "at least 1"),
        (b'{"inputs": [1]}', 422, "inputs.0"),
        (b'{"inputs": [{"image": "%"}]}', 422, "base64"),
        (b'{"inputs": [{"image": "aGFsbG8="}]}', 422, "PNG or JPEG"),
        (b'{"inputs": [{"image": "", "more": 1}]}', 422, "inputs.0.more"),
        (b'{"inputs": [1, 1, 1, 1, 1]}', 422, "inputs"),
        (b'{"inputs": [], "more": 1}', 422, "more"),
    ],
)
def test_json_that_is_no_input_is_refused(
    client: httpx.Client, body: bytes, status: int, words: str
) -> None:
    refused(post(client, body, JSON), status, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (256, "255"),
        (-1, "0"),
        (True, "bool"),
        ("1", "str"),
        (None, "NoneType"),
        (10**400, "finite"),
    ],
)
def test_a_pixel_that_is_none_is_refused(
    client: httpx.Client, value: Any, words: str
) -> None:
    pixels = some_inputs(1)[0].tolist()
    pixels[3][4] = [value]
    answer = client.post("/predict", json={"inputs": [pixels]})
    refused(answer, 422, "inputs.0.3.4.0")
    refused(answer, 422, words)


@pytest.mark.parametrize("value", [1.5, 2.6e-42, 254.999999999])
def test_a_pixel_that_is_not_whole_is_refused(
    client: httpx.Client, value: float
) -> None:
    pixels = some_inputs(1)[0].tolist()
    pixels[3][4] = [value]
    answer = client.post("/predict", json={"inputs": [pixels]})
    refused(answer, 422, f"{value:g}")


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"hello", 400, "numpy.save"),
        (npy(np.zeros((8, 8, 1), np.uint8))[:-1], 400, "cut short"),
        (npy(np.zeros((8, 8, 1), np.uint8)) + b"x", 400, "more follows"),
        (npy(np.zeros((8, 8, 1), np.int64)), 422, "uint8"),
        (npy(np.zeros((8, 9, 1), np.uint8)), 422, "(8, 8, 1)"),
        (npy(np.array([{"a": 1}], object)), 422, "object"),
        (npy(np.zeros((5, 8, 8, 1), np.uint8)), 422, "1 to 4"),
        (npy(np.zeros((0, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    ],
)
def test_an_array_file_that_is_no_input_is_refused(
    client: httpx.Client, content: bytes, status: int, words: str
) -> None:
    refused(post(client, content, NPY), status, words)


def test_an_image_that_is_huge_when_decoded_is_refused(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    assert len(file.getvalue()) < LIMITS.max_request_bytes
    answer = post(client, file.getvalue(), PNG)
    refused(answer, 413, "9000x9000")


def test_a_header_that_claims_any_size_is_refused(client: httpx.Client) -> None:
    content = bytearray(png(some_inputs(1)[0]))
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    answer = post(client, bytes(content), PNG)
    refused(answer, 413, "too large")


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "BMP"])
def test_other_kinds_of_files_are_not_decoded(client: httpx.Client, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, kind)
    answer = post(client, file.getvalue(), PNG)
    refused(answer, 422, "PNG")


def test_all_images_of_a_request_are_counted(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("1", (20, 20)).save(file, "PNG")
    parts = [("image", ("a.png", file.getvalue(), "image/png"))] * 3
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


@pytest.mark.parametrize("value", [b"[],", b"{},", b"0,", b'"",'])
def test_json_of_too_many_values_is_refused_before_it_is_parsed(
    client: httpx.Client, value: bytes
) -> None:
    content = b'{"inputs": [' + 1000 * value + b"0]}"
    refused(post(client, content, JSON), 413, "values")


def test_a_number_of_very_many_digits_is_refused(client: httpx.Client) -> None:
    content = b'{"inputs": [' + b"9" * 15_000 + b"]}"
    refused(post(client, content, JSON), 400, "JSON")


def test_pixels_of_16_bits_are_refused_and_not_cut_off(client: httpx.Client) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(deep, "PNG")
    answer = post(client, deep.getvalue(), PNG)
    refused(answer, 422, "expected 8-bit; scale them to 0-255")


@pytest.mark.parametrize("cut", [8, 40, 60])
def test_a_damaged_image_is_refused(client: httpx.Client, cut: int) -> None:
    content = png(some_inputs(1)[0])[:cut]
    refused(post(client, content, PNG), 422, "PNG")


@pytest.mark.parametrize("kind", ["text/plain", "image/gif", "", "a/b/c", "json"])
def test_other_content_types_are_refused(client: httpx.Client, kind: str) -> None:
    answer = post(client, b"{}", kind)
    refused(answer, 415, "application/json")


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "multipart/form-data", "boundary"),
        (b"", "multipart/form-data; boundary=x", "parts"),
        (
            b"--x\r\nno headers\r\n--x--",
            "multipart/form-data; boundary=x",
            "blank line",
        ),
        (b"--x\r\n\r\n--x", "multipart/form-data; boundary=x", "parts"),
    ],
)
def test_a_malformed_form_is_refused(
    client: httpx.Client, content: bytes, kind: str, words: str
) -> None:
    answer = post(client, content, kind)
    refused(answer, 400, words)


def test_a_form_with_other_fields_is_refused(client: httpx.Client) -> None:
    files = {"file": ("a.png", png(some_inputs(1)[0]), "image/png")}
    refused(client.post("/predict", files=files), 422, "'file'")


def test_a_body_that_is_too_large_is_refused(client: httpx.Client) -> None:
    answer = post(client, b" " * 20_001, JSON)
    refused(answer, 413, "more than 20000 bytes")

    def chunks() -> Iterator[bytes]:  # sent without a content length
        for _ in range(21):
            yield b" " * 1000

    answer = post(client, chunks(), JSON)
    refused(answer, 413, "more than 20000 bytes")
