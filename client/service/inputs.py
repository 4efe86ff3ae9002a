"""Inputs of a prediction, from what is sent: JSON, images, forms, arrays; limits."""

import base64
import binascii
import contextlib
import functools
import io
import itertools
import math
import re
import time
import tokenize
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from torch import Tensor

from knnper.data.characters import NUM_TOKENS, encode, plain
from knnper.data.dividing import clean_name
from knnper.data.examples import TEXTS, InputSpec
from knnper.data.images import upright
from knnper.data.pixel_depth import wide_pixels
from knnper.datastore.examples import (
    Selection,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from knnper.errors import DataError, KnnPerError
from knnper.transport.sockets import SocketLimits, read_pieces

STATUSES: Mapping[int, tuple[str, str]] = {
    400: ("malformed", "The body is not what its content type says."),
    401: ("unauthorized", "The token is missing or wrong."),
    403: ("forbidden", "The token lacks a scope, or another machine asks without one."),
    404: ("not_found", "There is nothing here."),
    405: ("method_not_allowed", "The method is not known here."),
    408: ("timeout", "The body arrives too slowly."),
    409: ("conflict", "A name is taken, or the store cannot do this."),
    413: ("too_large", "The request is more than the service takes at once."),
    415: ("unsupported_media_type", "The content type is not taken here."),
    422: ("invalid", "An input, a label or a name is not as described."),
    500: ("internal", "Something went wrong that should not."),
    503: ("unavailable", "No model is installed yet, or there is too much to do."),
    507: ("full", "What was sent fits neither the store's capacity nor the disk."),
}

_HEADERS = {
    401: {"WWW-Authenticate": 'Bearer realm="knnper"'},
    # The rest of the body is not read.
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class ErrorDocument(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    error: str = Field(description="A short name of the kind of error.")
    message: str = Field(
        description="What was found, what was expected, how to mend it."
    )


class RequestError(KnnPerError):
    """A request cannot be answered: a status of `STATUSES`, and what is wrong."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def answer(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an answer that says what is wrong."""
    name, _ = STATUSES.get(status, STATUSES[400 if status < 500 else 500])
    document = ErrorDocument(error=name, message=message).model_dump()
    return JSONResponse(
        document, status, {**_HEADERS.get(status, {}), **(headers or {})}
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI document says of these statuses."""
    return {
        status: {"model": ErrorDocument, "description": STATUSES[status][1]}
        for status in statuses
    }


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Answer what goes wrong; the server logs what nobody thought of."""
    if isinstance(error, RequestError):
        return answer(error.status, str(error), error.headers)
    if isinstance(error, RequestValidationError):  # a variable part of a path
        first = error.errors()[0]
        return answer(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    for kind, status in (
        (DataError, 422),
        (StoreFullError, 507),
        (StoreBusyError, 503),
        (StoreError, 409),
        (KnnPerError, 503),
    ):
        if isinstance(error, kind):
            return answer(status, str(error))
    return answer(500, "something went wrong that should not; the log says what")


@dataclass(frozen=True)
class Limits:
    """What requests may cost; each has a default that suits a small machine."""

    max_request_bytes: int = 16_000_000
    max_held_bytes: int = 256_000_000  # of all bodies that arrive or are worked on
    max_inputs: int = 256
    max_pixels: int = 50_000_000  # of all images of a request, as they are sent
    max_json_values: int = 2_000_000
    seconds: float = 30.0  # in which work has to begin, and a prediction to end
    num_readers: int = 2  # threads that predict; one more writes
    max_waiting: int = 64  # for a thread, in each of the two queues
    poll_s: float = 1.0
    sockets: SocketLimits = field(default_factory=SocketLimits)


@dataclass(frozen=True)
class Body:
    """What was sent: all of it, its type without parameters, the boundary of a form."""

    content: bytes
    media_type: str
    boundary: str = ""


class Bodies:
    """Reads requests' bodies, no more of them than is allowed."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._held = limits, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Give what a request sends, to be held until its answer is known."""
        self._require_size(int(request.headers.get("content-length", 0)))
        chunks, size = list[bytes](), 0
        try:
            async for chunk in read_pieces(request.receive, self._limits.sockets):
                size += len(chunk)
                self._held += len(chunk)
                self._require_size(size)
                chunks.append(chunk)
            header = request.headers.get("content-type", "")
            yield Body(b"".join(chunks), *_content_type(header))
        except TimeoutError as error:
            pace = self._limits.sockets
            raise RequestError(
                408,
                f"expected at least {pace.body_bytes_per_s:g} bytes of the body a "
                f"second, after {pace.body_grace_s:g} s",
            ) from error
        except ConnectionError as error:
            raise RequestError(400, "the body ended early") from error
        finally:
            self._held -= size

    def _require_size(self, size: int) -> None:
        limits = self._limits
        if size > limits.max_request_bytes:
            raise RequestError(
                413,
                f"the body has more than {limits.max_request_bytes} bytes; send fewer "
                "inputs at once, or raise service.max_request_mb",
            )
        if self._held > limits.max_held_bytes:
            held = f"{limits.max_held_bytes} bytes of requests are held already"
            close = {"Connection": "close"}
            raise RequestError(503, f"{held}; try again in a moment", close)


def _content_type(header: str) -> tuple[str, str]:
    """Return a header's media type, and the boundary of a form; empty without one."""
    media_type, parameters = value_and_parameters(header)
    return media_type.lower(), parameters.get("boundary", "")


def value_and_parameters(header: str) -> tuple[str, dict[str, str]]:
    """Split a header such as ``form-data; name="x"``; of equal names the first counts.

    Takes time in proportion to the header's length. Those of the module `email` take
    quadratic time, and have no end for some 100 kB.
    """
    parameters: dict[str, str] = {}
    for found in _PARAMETER.finditer(header):
        quoted, plain = found["quoted"], found["plain"]
        value = plain.strip() if quoted is None else quoted
        parameters.setdefault(found["name"].lower(), value)
    return header.partition(";")[0].strip(), parameters


class Budget:
    """What is left of what one request may cost once it is there."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._pixels = limits, limits.max_pixels
        self._end = time.monotonic() + limits.seconds

    @property
    def seconds(self) -> float:
        """That are left."""
        return self._end - time.monotonic()

    def take_pixels(self, width: int, height: int, passes: int) -> None:
        """Refuse an image, before it is decoded, for which too little is left."""
        self._pixels -= width * height * passes
        if self._pixels < 0:
            often = f", decoded {passes} times" if passes > 1 else ""
            raise RequestError(
                413,
                f"found an image of {width}x{height} pixels{often}, expected at most "
                f"{self._limits.max_pixels} pixels in all images of a request; make "
                "them smaller, send fewer at once, or raise service.max_megapixels",
            )
        if self.seconds < 0:
            late = f"{self._limits.seconds:g} s"
            raise RequestError(503, f"the images were not decoded in {late}")


JSON, NPY, FORM = "application/json", "application/x-npy", "multipart/form-data"
PICTURES = ("image/png", "image/jpeg")
FORM_FIELD = "image"
LARGEST_FLOAT = float(np.finfo(np.float32).max)
MAX_LISTED = 10_000
LATEST = 253_402_300_800.0  # the end of the year 9999
_FORMATS = ("PNG", "JPEG")
_MODES = {1: "L", 3: "RGB"}

# A progressive JPEG has ten scans. Each goes over all pixels, in a few bytes if it says
# nothing, so that thousands of them fit into a small file.
_SCAN, _SCANS_PER_PASS = b"\xff\xda", 16
# Pillow joins the pieces of a JPEG's Exif data one by one, in quadratic time; cameras
# write one, of 64 kB at most.
_EXIF, _MOST_EXIF = b"Exif\0\0", 16
_NO_HEADER = (
    *(KeyError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError),
    tokenize.TokenError,
)
_NPY_TYPES = {
    "uint8": ("uint8",),
    "float32": ("float32", "float64"),
    "int32": ("int32", "int64"),
}
_NPY_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}

_MAX_PART_HEADER = 4096
# The next quotation mark ends a quoted value, so that each is looked at once.
_PARAMETER = re.compile(
    r';\s*(?P<name>[^\s;="]+)\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^;"]*))'
)
_IN_ORDER: Any = Field(union_mode="left_to_right")

# What pydantic says of an alternative that was not meant, and the names it gives them.
_OTHER_ALTERNATIVE = frozenset(("model_type", "list_type", "dict_type"))
_ALTERNATIVES = frozenset(("Picture", "Text", "constrained-int"))
_LONGEST_MESSAGE = 1000
_MOST_NAMES = 10
M = TypeVar("M", bound=BaseModel)


def unsupported(found: str, *expected: str) -> RequestError:
    """Return the answer to a body of a type that is not taken."""
    names = ", ".join(expected)
    return RequestError(415, f"found content type {found!r}, expected one of {names}")


def _whole(value: Any) -> Any:
    """Return 2.0 as 2: in JSON they are the same number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[
    str, Field(min_length=1, max_length=1024, pattern="^[^\\x00]+$")
]  # as names of files are

Id = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(_whole)]
Time = Annotated[float, Field(ge=0, le=LATEST, description="Seconds since 1970 (UTC).")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Picture(_Strict):
    """An image whose size is changed as needed."""

    image: Annotated[
        str,
        Field(
            description="A PNG or JPEG file in base64.",
            json_schema_extra={"format": "picture-base64"},
        ),
    ]


class Example(_Strict):
    """An input and its label."""

    input: Any
    label: Any
    name: Name | None = Field(
        default=None, description="Your name for it, unique in the store."
    )


class PredictionRequest(_Strict):
    """Inputs to predict."""

    inputs: list[Any]


class AdditionRequest(_Strict):
    """Examples to store."""

    examples: list[Example]


class DeletionRequest(_Strict):
    """Examples that all of these describe; at least one is given."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    ids: list[Id] = Field(default=[], max_length=MAX_LISTED, fail_fast=True)
    names: list[Name] = Field(default=[], max_length=MAX_LISTED, fail_fast=True)
    labels: list[Any] = Field(default=[], max_length=MAX_LISTED, fail_fast=True)
    arrived_from: Time = 0.0
    arrived_before: Time = LATEST


class Reader:
    """Reads what is sent for one model; made by `reader_of`."""

    def __init__(
        self,
        spec: InputSpec,
        class_names: tuple[str, ...],
        limits: Limits,
        feature_names: tuple[str, ...] = (),
    ) -> None:
        self.spec, self.class_names, self._limits = spec, class_names, limits
        self.feature_names = feature_names if spec.dtype == "float32" else ()
        self._known_features = frozenset(self.feature_names)
        self.takes_pictures = is_picture(spec)
        self.takes_text = spec.dtype == "token" and spec.num_classes == NUM_TOKENS
        given, label, most = self._input_type(), self._label_type(), limits.max_inputs
        example = create_model(
            "Example", __base__=Example, input=(given, ...), label=(label, ...)
        )
        self.prediction = create_model(
            "PredictionRequest",
            __base__=PredictionRequest,
            inputs=(_listed(given, 1, most), ...),
        )
        self.addition = create_model(
            "AdditionRequest",
            __base__=AdditionRequest,
            examples=(_listed(example, 1, most), ...),
        )
        self.deletion = create_model(
            "DeletionRequest",
            __base__=DeletionRequest,
            labels=(_listed(label, 0, MAX_LISTED), []),
        )

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """How lists are nested: the input's shape; (d,) of features or characters."""
        shape: tuple[int, ...] = self.spec.image_shape
        if self.spec.dtype != "uint8" and shape[:2] == (1, 1):
            return shape[2:]
        return shape

    @property
    def media_types(self) -> tuple[str, ...]:
        """What a body of inputs alone may be."""
        return (JSON, NPY, *(PICTURES if self.takes_pictures else ()), FORM)

    def inputs(self, body: Body, budget: Budget) -> Tensor:
        """Return the n inputs of a body, of the input's type and shape (n, ...)."""
        if body.media_type == JSON:
            given = self._parsed(self.prediction, body).inputs
            return self._joined([self._one(one, budget) for one in given])
        if body.media_type == FORM:
            parts = _split_form(body, self._limits.max_inputs)
            return self._joined([self._file(*part, budget) for part in parts])
        return self._joined([self._file(body.media_type, body.content, budget)])

    def examples(
        self, body: Body, budget: Budget
    ) -> tuple[Tensor, Tensor, tuple[str | None, ...]]:
        """Return n inputs, their labels (int64) and names."""
        sent = self._parsed(self.addition, body).examples
        inputs = self._joined([self._one(one.input, budget) for one in sent])
        labels = [self._label(one.label) for one in sent]
        return inputs, torch.tensor(labels), tuple(one.name for one in sent)

    def selection(self, body: Body) -> Selection:
        """Return what is to be deleted, which is never everything."""
        asked = self._parsed(self.deletion, body)
        given = asked.model_fields_set
        if not given:
            kinds = ", ".join(DeletionRequest.model_fields)
            raise RequestError(422, f"expected {kinds}, found none of them")
        values = {name: getattr(asked, name) for name in given}
        for name in given & {"ids", "names", "labels"}:
            values[name] = tuple(values[name])
        if "names" in given:
            values["external_ids"] = values.pop("names")
        if "labels" in given:
            values["labels"] = tuple(map(self._label, asked.labels))
        return Selection(**values)

    def _label(self, label: int | str) -> int:
        return label if isinstance(label, int) else self.class_names.index(label)

    def _input_type(self) -> Any:
        if self.spec.dtype == "float32":
            number: Any = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
        else:
            most = self.spec.largest_whole
            whole = {"type": "integer", "minimum": 0, "maximum": most}
            # Not `int`, which 1.0 is to JSON. That it is whole is looked at by NumPy.
            number = Annotated[float, Field(ge=0, le=most), WithJsonSchema(whole)]
        by_name = self._by_name_type(number) if self.feature_names else None
        for length in reversed(self.sent_shape):
            number = _listed(number, length, length)
        if self.takes_pictures:
            return Annotated[number | Picture, _IN_ORDER]
        if self.takes_text:
            longer = {"minLength": self.sent_shape[0]}
            text = Annotated[str, Field(json_schema_extra=longer)]
            model = create_model("Text", __base__=_Strict, text=(text, ...))
            return Annotated[number | model, _IN_ORDER]
        return number if by_name is None else Annotated[number | by_name, _IN_ORDER]

    def _by_name_type(self, number: Any) -> Any:
        """Return the type of an object with a number for each feature."""
        # All features are alike, and there may be thousands of them.
        largest = {
            "type": "number",
            "minimum": -LARGEST_FLOAT,
            "maximum": LARGEST_FLOAT,
        }
        schema = {
            "type": "object",
            "properties": dict.fromkeys(self.feature_names, largest),
            "required": list(self.feature_names),
            "additionalProperties": False,
        }
        in_order = AfterValidator(self._in_order)
        return Annotated[dict[str, number], in_order, WithJsonSchema(schema)]

    def _in_order(self, values: dict[str, float]) -> list[float]:
        """Return the values of features by name in the order that the model takes."""
        missing = [name for name in self.feature_names if name not in values]
        surplus = [name for name in values if name not in self._known_features]
        if missing or surplus:
            name = (missing or surplus)[0][:40]
            wrong = "no value of" if missing else "a value of the unknown"
            raise ValueError(
                f"found {wrong} feature {name!r}, expected one of each feature: "
                f"{', '.join(self.feature_names[:_MOST_NAMES])}"
            )
        return [values[name] for name in self.feature_names]

    def _label_type(self) -> Any:
        number = Annotated[
            int,
            Field(ge=0, le=len(self.class_names) - 1, description="Of a class."),
            BeforeValidator(_whole),
        ]
        # mypy reads what is in the brackets as types.
        names: Any = Literal
        named: Any = names[self.class_names]
        name = Annotated[named, BeforeValidator(self._class_name)]
        return Annotated[name | number, _IN_ORDER]

    def _class_name(self, label: Any) -> Any:
        """Return the class name that equals ``label`` as `clean_name` makes both."""
        if not isinstance(label, str) or label in self.class_names:
            return label
        clean = clean_name(label)
        alike = (name for name in self.class_names if clean_name(name) == clean)
        return next(alike, label)

    def _parsed(self, expected: type[M], body: Body) -> M:
        if body.media_type != JSON:
            raise unsupported(body.media_type, JSON)
        # At least as many as there are: a text may hold such characters, too.
        values = sum(map(body.content.count, (b",", b"[", b"{")))
        if values > self._limits.max_json_values:
            most = self._limits.max_json_values
            found = f"found {values} values in JSON, expected at most {most}"
            raise RequestError(413, f"{found}; send fewer inputs at once, or as files")
        try:
            return expected.model_validate_json(body.content)
        except ValidationError as error:
            raise _unfit(error) from error

    def _one(self, given: Any, budget: Budget) -> NDArray[Any]:
        if isinstance(given, Picture):
            try:
                content = base64.b64decode(given.image, validate=True)
            except (binascii.Error, ValueError) as error:
                message = f"expected an image in base64: {error}"
                raise RequestError(422, message) from error
            return decode_picture(content, self.spec, budget)
        if isinstance(given, BaseModel):
            length = self.sent_shape[0]
            ids = encode(plain(given.text))[-length:]  # type: ignore[attr-defined]
            if len(ids) < length:
                raise RequestError(
                    422,
                    f"expected a text of at least {length} characters, of which the "
                    f"last {length} are read, found {len(ids)}",
                )
            return ids.reshape(1, *self.spec.image_shape)
        for _ in self.sent_shape[1:]:
            given = list(itertools.chain.from_iterable(given))
        array = np.array(given, np.float64)
        if self.spec.dtype != "float32" and (fractions := array % 1).any():
            odd = array[fractions != 0][0]
            raise RequestError(422, f"expected whole numbers, found {odd:g}")
        return array.astype(self.spec.stored_dtype).reshape(1, *self.spec.image_shape)

    def _file(self, media_type: str, content: bytes, budget: Budget) -> NDArray[Any]:
        if media_type == NPY:
            array = from_npy(content, self.sent_shape, self.spec.stored_dtype)
            return array.reshape(-1, *self.spec.image_shape)
        if self.takes_pictures and media_type in PICTURES:
            return decode_picture(content, self.spec, budget)
        raise unsupported(media_type, *self.media_types)

    def _joined(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        count, limit = sum(map(len, parts)), self._limits.max_inputs
        if not 1 <= count <= limit:
            found = f"inputs in a request, found {count}"
            raise RequestError(422, f"expected 1 to {limit} {found}")
        inputs = np.concatenate(parts)
        if self.spec.dtype in TEXTS:
            last = self.spec.largest_whole
            wrong = inputs[(inputs < 0) | (inputs > last)]
            if wrong.size:
                what = "characters" if self.spec.dtype == "token" else "the tokenizer"
                expected = f"expected ids of {what} from 0 to {last}"
                raise RequestError(422, f"{expected}, found {wrong[0]}")
        return torch.from_numpy(inputs)


# Return the `Reader` of a model, for which types are made once.
reader_of = functools.lru_cache(maxsize=4)(Reader)


def _listed(one: Any, least: int, most: int) -> Any:
    return Annotated[
        list[one], Field(min_length=least, max_length=most, fail_fast=True)
    ]


def _unfit(error: ValidationError) -> RequestError:
    """Return what is wrong first; of alternatives, with the one that was meant."""
    problems = error.errors(include_url=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return RequestError(400, f"expected JSON: {problems[0]['msg']}")
    meant = [one for one in problems if one["type"] not in _OTHER_ALTERNATIVE]
    said = []
    for one in (meant or problems)[:3]:
        parts = [str(part) for part in one["loc"]]
        # Without pydantic's names of alternatives.
        own = [part for part in parts if "[" not in part and part not in _ALTERNATIVES]
        found = _shown(one["input"])
        said.append(f"{'.'.join(own) or 'body'}: {one['msg']}, found {found}")
    return RequestError(422, "; ".join(said)[:_LONGEST_MESSAGE])


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def is_picture(spec: InputSpec) -> bool:
    """Whether inputs of this kind can be sent and shown as images."""
    shape = spec.image_shape
    return spec.dtype == "uint8" and len(shape) == 3 and shape[2] in _MODES


def decode_picture(
    content: bytes, spec: InputSpec, budget: Budget
) -> NDArray[np.uint8]:
    """Return the pixels of a PNG or JPEG file, shape (1, height, width, channels)."""
    # Colours are converted and the size is changed as `knnper.data.images` does.
    height, width, channels = spec.image_shape
    try:
        # The limit is ours; Pillow's own would only warn.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = _decoded(content, _MODES[channels], budget)
    except Image.DecompressionBombError as error:
        raise RequestError(413, f"found an image that is too large: {error}") from error
    # Pillow raises what its decoders do, with damaged files.
    except (OSError, SyntaxError, ValueError, OverflowError, EOFError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        found = "another kind of file" if unknown else f"a damaged one: {error}"
        raise RequestError(
            422, f"expected an image as PNG or JPEG, found {found}"
        ) from error
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(1, height, width, channels)


def _decoded(content: bytes, mode: str, budget: Budget) -> Image.Image:
    if content.count(_EXIF) > _MOST_EXIF:
        raise RequestError(
            422, f"found Exif data in more than {_MOST_EXIF} pieces; remove it"
        )
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        scans = content.count(_SCAN) if image.format != "PNG" else 1
        budget.take_pixels(image.width, image.height, 1 + scans // _SCANS_PER_PASS)
        wide = wide_pixels(image)
        if wide is not None:
            found = f"found {wide} pixels (mode {image.mode})"
            raise RequestError(422, f"{found}, expected 8-bit; scale them to 0-255")
        return upright(image).convert(mode)


def from_npy(content: bytes, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return the inputs (n, *shape) in a file of `numpy.save`; nothing in it is run."""
    file = io.BytesIO(content)
    try:
        found_shape, in_columns, found = _NPY_HEADERS[npy.read_magic(file)](file)
    # Own code: numpy.load would copy, and believe the size that a header claims.
    except _NO_HEADER as error:
        raise RequestError(
            400, f"expected a file of numpy.save, found what cannot be read: {error}"
        ) from error
    expected = _NPY_TYPES[dtype]
    if found not in [np.dtype(name) for name in expected]:
        types = " or ".join(expected)
        raise RequestError(422, f"expected an array of {types}, found {found}")
    if found_shape != shape and found_shape[1:] != shape:
        shapes = f"{shape} or (n, *{shape})"
        raise RequestError(422, f"expected the shape {shapes}, found {found_shape}")
    data = content[file.tell() :]
    # A shape may be negative, but none has that many bytes.
    if math.prod(found_shape) * found.itemsize != len(data) or min(found_shape) < 0:
        raise RequestError(400, "the array is cut short, or more follows it")
    order: Literal["F", "C"] = "F" if in_columns else "C"
    array = np.frombuffer(data, found).reshape(found_shape, order=order)
    if dtype == "float32" and not (np.abs(array) <= LARGEST_FLOAT).all():
        raise RequestError(422, "expected numbers that float32 can hold, no NaN")
    if dtype == "int32":
        # What is too large would be cut off, and look like another id.
        array = np.clip(array, -1, np.iinfo(np.int32).max)
    return np.array(array, dtype, order="C").reshape(-1, *shape)


def _split_form(body: Body, max_parts: int) -> list[tuple[str, bytes]]:
    """Return type and content of the parts of ``multipart/form-data`` (RFC 7578)."""
    # Own code: libraries for forms write files to disk, and take a form that is cut
    # short without its last input.
    if not body.boundary.isascii() or not 1 <= len(body.boundary) <= 70:
        raise _malformed("a boundary of 1 to 70 characters in the content type")
    # The first delimiter has no line before it.
    pieces = (b"\r\n" + body.content).split(b"\r\n--" + body.boundary.encode("ascii"))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _malformed("parts, and --boundary-- at the end")
    parts = pieces[1:-1]
    if len(parts) > max_parts:
        found = f"found {len(parts)} parts"
        raise RequestError(422, f"{found}, expected at most {max_parts}")
    return [_part(piece) for piece in parts]


def _part(piece: bytes) -> tuple[str, bytes]:
    head, separator, content = piece.partition(b"\r\n\r\n")
    if not separator or len(head) > _MAX_PART_HEADER:
        raise _malformed("a blank line after the headers of each part")
    headers: dict[str, str] = {}
    for line in head.decode("latin-1").split("\r\n"):
        key, _, value = line.partition(":")
        headers.setdefault(key.strip().lower(), value.strip())
    _, parameters = value_and_parameters(headers.get("content-disposition", ""))
    name = parameters.get("name", "")
    if name != FORM_FIELD:
        raise RequestError(422, f"found a field {name!r}, expected {FORM_FIELD!r} only")
    media_type, _ = _content_type(headers.get("content-type", ""))
    return media_type, content


def _malformed(expected: str) -> RequestError:
    return RequestError(400, f"the form is malformed: expected {expected}")
