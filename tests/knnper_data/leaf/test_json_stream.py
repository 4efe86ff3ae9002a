import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data import leaf as json_stream
from knnper.data.leaf import JsonStream
from knnper.errors import DataError

texts = st.text(max_size=8)
# Brackets, quotes and backslashes are what a text may confuse the stream with.
nasty = st.text(alphabet='{}[]"\\,: aé☃\n', max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | texts | nasty
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(nasty, inner, max_size=3)
    ),
    max_leaves=6,
)
flat = st.dictionaries(nasty, st.lists(scalars, max_size=3), max_size=3)


def stream_of(text: str | bytes, chunk: int = 1 << 20) -> JsonStream:
    given_bytes = text.encode() if isinstance(text, str) else text
    return JsonStream(_Dripping(given_bytes, chunk), Path("file.json"))


class _Dripping(io.BytesIO):
    """Gives a few bytes at a time, however many are asked for."""

    def __init__(self, text: bytes, chunk: int) -> None:
        super().__init__(text)
        self._chunk = chunk

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._chunk)


def members_of(stream: JsonStream) -> dict[str, Any]:
    return {name: json.loads(stream.value()) for name in stream.members()}


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(nasty, values, max_size=4),
    st.integers(1, 7),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_what_was_written_is_read(
    written: dict[str, Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(written, indent=indent, ensure_ascii=ascii_only)
    stream = stream_of(text, chunk)
    assert members_of(stream) == written
    stream.require_end()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(texts, flat, max_size=3), st.integers(1, 7), st.booleans())
def test_flat_objects_are_read(
    written: dict[str, Any], chunk: int, ascii_only: bool
) -> None:
    stream = stream_of(json.dumps(written, ensure_ascii=ascii_only), chunk)
    found = {name: json.loads(stream.flat_object()) for name in stream.members()}
    assert found == written


def test_only_the_value_at_hand_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_LEAST_CHUNK", 100)
    text = json.dumps({str(number): [number] * 20 for number in range(1000)})
    stream = stream_of(text, chunk=100)
    for _ in stream.members():
        stream.value()
        assert len(stream._held) <= 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"at byte 0 expected '\{', found the end of the file"),
        ("[1]", r"at byte 0 expected '\{', found '\[1\]'"),
        ('{"a" 1}', "at byte 5 expected ':', found '1}'"),
        ('{"a": 1 "b": 2}', "at byte 8 expected '}', found '\"b\": 2}'"),
        ('{"a": 1', "expected '}', found the end of the file"),
        ('{"a": [1, 2', r"at byte 6 '\[1, 2' has no end"),
        ('{"a": "text', "has no end"),
        ('{"a": {"b": "}"', "has no end"),
        ("{1: 2}", "expected a name in double quotes, found '1: 2}'"),
        ('{"a": 1}}', "expected the end of the file, found '}'"),
        (b'{"\xff": 1}', "at byte 1 this is no JSON"),
    ],
)
def test_what_is_wrong_is_said(text: str | bytes, message: str) -> None:
    stream = stream_of(text)

    def read() -> None:
        for _ in stream.members():
            stream.value()
        stream.require_end()

    with pytest.raises(DataError, match=message) as caught:
        read()
    assert "file.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object"),
        ('{"a": "}"', "has no end"),
        ("", "end of the file"),
    ],
)
def test_a_flat_object_that_is_none(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream_of(text).flat_object()


def test_a_value_that_is_no_json() -> None:
    with pytest.raises(DataError, match="at byte 2 this is no JSON"):
        stream_of("  nothing").parsed()


def test_a_value_that_is_too_deep_is_refused() -> None:
    depth = 200_000
    with pytest.raises(DataError, match=r"this is no JSON .*recursion"):
        stream_of("[" * depth + "]" * depth).parsed()


def test_a_byte_order_mark_is_passed_over() -> None:
    stream = stream_of(b'\xef\xbb\xbf{"a": 1}')
    assert members_of(stream) == {"a": 1}
    stream.require_end()
    with pytest.raises(DataError, match=r"at byte 3 expected '\{', found '\[1\]'"):
        members_of(stream_of(b"\xef\xbb\xbf[1]"))
