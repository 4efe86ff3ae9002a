"""Inputs, examples and selections in requests: their types, and how they are read.

The types depend on the model: the shape and range of its inputs, its features and its
classes. Pydantic validates JSON by them, and the OpenAPI document shows them.
"""

import base64
import binascii
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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

from knnper.client.service.bodies import FORM, Body, Budget, RequestLimits
from knnper.client.service.errors import RequestError
from knnper.client.service.files import (
    LARGEST_FLOAT,
    decode_picture,
    is_picture,
    read_npy,
)
from knnper.data.characters import NUM_TOKENS, encode, plain
from knnper.data.dividing import clean_name
from knnper.data.examples import TEXTS, InputSpec
from knnper.datastore.examples import Selection

JSON = "application/json"
NPY = "application/x-npy"
PICTURES = ("image/png", "image/jpeg")
MAX_SELECTED = 10_000  # ids, names or labels of one deletion
LATEST = 253_402_300_800.0  # the end of the year 9999, in seconds since 1970

_MAX_MESSAGE_LENGTH = 1000
_MAX_PROBLEMS = 3
_MAX_FEATURES_SHOWN = 10
_LEFT_TO_RIGHT: Any = Field(union_mode="left_to_right")
# Errors that pydantic reports for the alternatives that were not meant, and the names
# that it gives to alternatives.
_OTHER_ALTERNATIVE = frozenset(("model_type", "list_type", "dict_type"))
_ALTERNATIVES = frozenset(("Picture", "Text", "constrained-int"))

M = TypeVar("M", bound=BaseModel)


def _whole_number(value: Any) -> Any:
    """Convert 2.0 to 2: in JSON they are the same number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[str, Field(min_length=1, max_length=1024, pattern="^[^\\x00]+$")]
Id = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(_whole_number)]
Time = Annotated[float, Field(ge=0, le=LATEST, description="Seconds since 1970 (UTC).")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Picture(_Strict):
    """An image of any size."""

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
    """Selects the examples that match all given fields; at least one is given."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    ids: list[Id] = Field(default=[], max_length=MAX_SELECTED, fail_fast=True)
    names: list[Name] = Field(default=[], max_length=MAX_SELECTED, fail_fast=True)
    labels: list[Any] = Field(default=[], max_length=MAX_SELECTED, fail_fast=True)
    arrived_from: Time = 0.0
    arrived_before: Time = LATEST


class RequestReader:
    """Reads the requests for one model; made by `request_reader`, which keeps it.

    Numbers in JSON pass through pydantic, which names the place of a wrong one. For one
    image of 32x32x3 that takes as long as `json.loads` with `numpy.asarray` and checks
    of shape and range (0.77 and 0.74 ms of a core), for 64 images 55 ms instead of 34.

    Attributes
    ----------
    prediction, addition, deletion
        Pydantic models of the JSON bodies.
    takes_pictures, takes_text
        Whether inputs may be image files, or text.
    """

    def __init__(
        self,
        spec: InputSpec,
        class_names: tuple[str, ...],
        limits: RequestLimits,
        feature_names: tuple[str, ...] = (),
    ) -> None:
        self.spec = spec
        self.class_names = class_names
        self._limits = limits
        self.feature_names = feature_names if spec.dtype == "float32" else ()
        self._feature_set = frozenset(self.feature_names)
        self.takes_pictures = is_picture(spec)
        self.takes_text = spec.dtype == "token" and spec.num_classes == NUM_TOKENS
        input_type = self._input_type()
        label_type = self._label_type()
        example = create_model(
            "Example",
            __base__=Example,
            input=(input_type, ...),
            label=(label_type, ...),
        )
        self.prediction = create_model(
            "PredictionRequest",
            __base__=PredictionRequest,
            inputs=(_list_of(input_type, 1, limits.max_inputs), ...),
        )
        self.addition = create_model(
            "AdditionRequest",
            __base__=AdditionRequest,
            examples=(_list_of(example, 1, limits.max_inputs), ...),
        )
        self.deletion = create_model(
            "DeletionRequest",
            __base__=DeletionRequest,
            labels=(_list_of(label_type, 0, MAX_SELECTED), []),
        )

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the nested lists of an input; (d,) of features or characters."""
        shape: tuple[int, ...] = self.spec.image_shape
        if self.spec.dtype != "uint8" and shape[:2] == (1, 1):
            return shape[2:]
        return shape

    @property
    def media_types(self) -> tuple[str, ...]:
        """Content types of a body of inputs."""
        return (JSON, NPY, *(PICTURES if self.takes_pictures else ()), FORM)

    # Reading bodies

    def inputs(self, body: Body, budget: Budget) -> Tensor:
        """Read the n inputs of a body, of the model's type and shape (n, ...)."""
        if body.media_type == JSON:
            values = self._parse(self.prediction, body).inputs
            return self._join([self._read_value(value, budget) for value in values])
        if body.media_type == FORM:
            return self._join(
                [
                    self._read_file(file.content_type or "", file.file.read(), budget)
                    for file in body.files
                ]
            )
        return self._join([self._read_file(body.media_type, body.content, budget)])

    def examples(
        self, body: Body, budget: Budget
    ) -> tuple[Tensor, Tensor, tuple[str | None, ...]]:
        """Read n inputs, their labels (int64) and names."""
        examples = self._parse(self.addition, body).examples
        inputs = self._join(
            [self._read_value(example.input, budget) for example in examples]
        )
        labels = [self._label_number(example.label) for example in examples]
        names = tuple(example.name for example in examples)
        return inputs, torch.tensor(labels), names

    def selection(self, body: Body) -> Selection:
        """Read which examples to delete; an empty selection is refused."""
        request = self._parse(self.deletion, body)
        fields = request.model_fields_set
        if not fields:
            kinds = ", ".join(DeletionRequest.model_fields)
            raise RequestError(422, f"expected {kinds}, found none of them")
        values = {name: getattr(request, name) for name in fields}
        for name in fields & {"ids", "names", "labels"}:
            values[name] = tuple(values[name])
        if "names" in fields:
            values["external_ids"] = values.pop("names")
        if "labels" in fields:
            values["labels"] = tuple(map(self._label_number, request.labels))
        return Selection(**values)

    def _parse(self, expected: type[M], body: Body) -> M:
        if body.media_type != JSON:
            raise _unsupported(body.media_type, JSON)
        # An upper bound, found before parsing: a text may hold these characters, too.
        num_values = sum(map(body.content.count, (b",", b"[", b"{")))
        if num_values > self._limits.max_json_values:
            raise RequestError(
                413,
                f"found {num_values} values in JSON, expected at most "
                f"{self._limits.max_json_values}; send fewer inputs at once, or as "
                "files",
            )
        try:
            return expected.model_validate_json(body.content)
        except ValidationError as error:
            raise _validation_problem(error) from error

    def _read_value(self, value: Any, budget: Budget) -> NDArray[Any]:
        """Convert a validated input of JSON to an array of shape (1, ...)."""
        if isinstance(value, Picture):
            try:
                content = base64.b64decode(value.image, validate=True)
            except (binascii.Error, ValueError) as error:
                raise RequestError(
                    422, f"expected an image in base64: {error}"
                ) from error
            return decode_picture(content, self.spec, budget)
        if isinstance(value, BaseModel):
            return self._read_text(value.text)  # type: ignore[attr-defined]
        for _ in self.sent_shape[1:]:
            value = list(itertools.chain.from_iterable(value))
        array = np.array(value, np.float64)
        if self.spec.dtype != "float32" and (fractions := array % 1).any():
            odd = array[fractions != 0][0]
            raise RequestError(422, f"expected whole numbers, found {odd:g}")
        return array.astype(self.spec.stored_dtype).reshape(1, *self.spec.image_shape)

    def _read_text(self, text: str) -> NDArray[Any]:
        """Encode the last T characters of a text."""
        length = self.sent_shape[0]
        ids = encode(plain(text))[-length:]
        if len(ids) < length:
            raise RequestError(
                422,
                f"expected a text of at least {length} characters (the last {length} "
                f"are read), found {len(ids)}",
            )
        return ids.reshape(1, *self.spec.image_shape)

    def _read_file(
        self, media_type: str, content: bytes, budget: Budget
    ) -> NDArray[Any]:
        if media_type == NPY:
            array = read_npy(content, self.sent_shape, self.spec.stored_dtype)
            return array.reshape(-1, *self.spec.image_shape)
        if self.takes_pictures and media_type in PICTURES:
            return decode_picture(content, self.spec, budget)
        raise _unsupported(media_type, *self.media_types)

    def _join(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        count = sum(map(len, parts))
        limit = self._limits.max_inputs
        if not 1 <= count <= limit:
            raise RequestError(
                422, f"expected 1 to {limit} inputs in a request, found {count}"
            )
        inputs = np.concatenate(parts)
        if self.spec.dtype in TEXTS:
            largest = self.spec.largest_whole
            unknown = inputs[(inputs < 0) | (inputs > largest)]
            if unknown.size:
                kind = "characters" if self.spec.dtype == "token" else "the tokenizer"
                raise RequestError(
                    422,
                    f"expected ids of {kind} from 0 to {largest}, found {unknown[0]}",
                )
        return torch.from_numpy(inputs)

    def _label_number(self, label: int | str) -> int:
        return label if isinstance(label, int) else self.class_names.index(label)

    # Types of JSON

    def _input_type(self) -> Any:
        if self.spec.dtype == "float32":
            number: Any = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
        else:
            largest = self.spec.largest_whole
            schema = {"type": "integer", "minimum": 0, "maximum": largest}
            # A float, since 1.0 is an integer in JSON; `_read_value` rejects fractions.
            number = Annotated[float, Field(ge=0, le=largest), WithJsonSchema(schema)]
        by_name = self._by_name_type(number) if self.feature_names else None
        for length in reversed(self.sent_shape):
            number = _list_of(number, length, length)
        if self.takes_pictures:
            return Annotated[number | Picture, _LEFT_TO_RIGHT]
        if self.takes_text:
            text_type = Annotated[
                str, Field(json_schema_extra={"minLength": self.sent_shape[0]})
            ]
            text = create_model("Text", __base__=_Strict, text=(text_type, ...))
            return Annotated[number | text, _LEFT_TO_RIGHT]
        if by_name is not None:
            return Annotated[number | by_name, _LEFT_TO_RIGHT]
        return number

    def _by_name_type(self, number: Any) -> Any:
        """Return the type of an object with a number for each feature."""
        # Not a pydantic model: there may be thousands of features, all alike.
        number_schema = {
            "type": "number",
            "minimum": -LARGEST_FLOAT,
            "maximum": LARGEST_FLOAT,
        }
        schema = {
            "type": "object",
            "properties": dict.fromkeys(self.feature_names, number_schema),
            "required": list(self.feature_names),
            "additionalProperties": False,
        }
        return Annotated[
            dict[str, number],
            AfterValidator(self._order_features),
            WithJsonSchema(schema),
        ]

    def _order_features(self, values: dict[str, float]) -> list[float]:
        """Return the values of features by name in the order of the model."""
        missing = [name for name in self.feature_names if name not in values]
        unknown = [name for name in values if name not in self._feature_set]
        if missing or unknown:
            name = (missing or unknown)[0][:40]
            problem = "no value of" if missing else "a value of the unknown"
            raise ValueError(
                f"found {problem} feature {name!r}, expected one of each feature: "
                f"{', '.join(self.feature_names[:_MAX_FEATURES_SHOWN])}"
            )
        return [values[name] for name in self.feature_names]

    def _label_type(self) -> Any:
        number = Annotated[
            int,
            Field(ge=0, le=len(self.class_names) - 1, description="Of a class."),
            BeforeValidator(_whole_number),
        ]
        # A variable, since mypy reads the brackets of `Literal` as types.
        literal: Any = Literal
        name_type: Any = literal[self.class_names]
        name = Annotated[name_type, BeforeValidator(self._class_name)]
        return Annotated[name | number, _LEFT_TO_RIGHT]

    def _class_name(self, label: Any) -> Any:
        """Return the class name that equals ``label`` once `clean_name` cleans both."""
        if not isinstance(label, str) or label in self.class_names:
            return label
        cleaned = clean_name(label)
        equal = (name for name in self.class_names if clean_name(name) == cleaned)
        return next(equal, label)


# Pydantic needs long to build the types of a model, so they are built once.
request_reader = functools.lru_cache(maxsize=4)(RequestReader)


def _list_of(item: Any, min_length: int, max_length: int) -> Any:
    length = Field(min_length=min_length, max_length=max_length, fail_fast=True)
    return Annotated[list[item], length]


def _unsupported(media_type: str, *expected: str) -> RequestError:
    names = ", ".join(expected)
    return RequestError(
        415, f"found content type {media_type!r}, expected one of {names}"
    )


def _validation_problem(error: ValidationError) -> RequestError:
    """Describe the first problems; of alternatives, only those of the one meant."""
    problems = error.errors(include_url=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return RequestError(400, f"expected JSON: {problems[0]['msg']}")
    relevant = [
        problem for problem in problems if problem["type"] not in _OTHER_ALTERNATIVE
    ]
    sentences = []
    for problem in (relevant or problems)[:_MAX_PROBLEMS]:
        # Pydantic's names of alternatives are left out of the place.
        place = [
            part
            for part in map(str, problem["loc"])
            if "[" not in part and part not in _ALTERNATIVES
        ]
        value = problem["input"]
        kind = type(value).__name__
        is_nested = isinstance(value, list | dict)
        shown = (
            f"{kind} of {len(value)}" if is_nested else f"{kind} {str(value)[:40]!r}"
        )
        sentences.append(
            f"{'.'.join(place) or 'body'}: {problem['msg']}, found {shown}"
        )
    return RequestError(422, "; ".join(sentences)[:_MAX_MESSAGE_LENGTH])
