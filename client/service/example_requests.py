"""What is asked of the memory: examples to add, examples to delete."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from torch import Tensor

from client.service.body import Body, unsupported
from client.service.inputs import JSON, InputReader, read_json
from client.service.problems import RequestError
from datastore.examples import Selection

MAX_LISTED = 10_000
LATEST = 253_402_300_800.0  # the end of the year 9999
_MAX_ID = 2**63 - 1
_STRICT = ConfigDict(extra="forbid", strict=True)


def _whole(value: Any) -> Any:
    """Return 2.0 as 2: in JSON they are the same number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[
    str, Field(min_length=1, max_length=1024, pattern="^[^\\x00]+$")
]  # as names of files are
Label = Annotated[
    int | str,
    Field(description="Number or name of a class."),
    BeforeValidator(_whole),
]
Id = Annotated[int, Field(ge=1, le=_MAX_ID), BeforeValidator(_whole)]
Time = Annotated[float, Field(ge=0, le=LATEST, description="Seconds since 1970 (UTC).")]

T = TypeVar("T", bound=BaseModel)


class ExampleRequest(BaseModel):
    """An input and its label."""

    model_config = _STRICT

    input: Any
    label: Label
    name: Annotated[
        Name | None, Field(description="Your name for it, unique in the store.")
    ] = None


class ExamplesRequest(BaseModel):
    """Examples to store."""

    model_config = _STRICT

    examples: Annotated[list[ExampleRequest], Field(min_length=1)]


class DeletionRequest(BaseModel):
    """Examples that all of these describe; at least one is given."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"minProperties": 1}
    )

    ids: Annotated[list[Id], Field(max_length=MAX_LISTED)] = Field(default=[])
    names: Annotated[list[Name], Field(max_length=MAX_LISTED)] = Field(default=[])
    labels: Annotated[list[Label], Field(max_length=MAX_LISTED)] = Field(default=[])
    arrived_from: Time = 0.0
    arrived_before: Time = LATEST


@dataclass(frozen=True)
class SentExamples:
    """n examples that were sent.

    Attributes
    ----------
    inputs
        Shape (n, ...).
    labels
        int64, shape (n,).
    names
        n names.
    """

    inputs: Tensor
    labels: Tensor
    names: tuple[str | None, ...]


def read_examples(
    body: Body, reader: InputReader, class_names: Sequence[str]
) -> SentExamples:
    """Return the examples that a body describes.

    Raises
    ------
    RequestError
        400, 415 or 422 if they are not as described.
    """
    sent = _parsed(ExamplesRequest, body).examples
    inputs = [
        reader.one(one.input, f"examples[{place}].input")
        for place, one in enumerate(sent)
    ]
    labels = [label_number(one.label, class_names) for one in sent]
    return SentExamples(
        reader.joined(inputs), torch.tensor(labels), tuple(one.name for one in sent)
    )


def read_selection(body: Body, class_names: Sequence[str]) -> Selection:
    """Return what a body says is to be deleted.

    Raises
    ------
    RequestError
        400, 415 or 422 if it is not as described, or describes all examples.
    """
    asked = _parsed(DeletionRequest, body)
    given = asked.model_fields_set
    if not given:
        raise RequestError(
            422,
            "expected ids, names, labels, arrived_from or arrived_before, found none",
        )
    labels = tuple(label_number(label, class_names) for label in asked.labels)
    return Selection(
        ids=tuple(asked.ids) if "ids" in given else None,
        external_ids=tuple(asked.names) if "names" in given else None,
        labels=labels if "labels" in given else None,
        arrived_from=asked.arrived_from if "arrived_from" in given else None,
        arrived_before=asked.arrived_before if "arrived_before" in given else None,
    )


def label_number(label: int | str, class_names: Sequence[str]) -> int:
    """Return the number of a class that is given by name or number.

    Raises
    ------
    RequestError
        422 if there is no such class.
    """
    if isinstance(label, int) and 0 <= label < len(class_names):
        return label
    if isinstance(label, str) and label in class_names:
        return class_names.index(label)
    known = ", ".join(class_names[:20])
    raise RequestError(
        422,
        f"found the label {label!r}, expected a number from 0 to "
        f"{len(class_names) - 1}, or one of {known}",
    )


def _parsed(document_type: type[T], body: Body) -> T:
    if body.media_type != JSON:
        raise unsupported(body.media_type, JSON)
    try:
        return TypeAdapter(document_type).validate_python(read_json(body.content))
    except ValidationError as error:
        raise RequestError(422, described(error)) from error


def described(error: ValidationError) -> str:
    """Return the first things that are wrong, in one line."""
    problems = error.errors(include_url=False, include_context=False)[:5]
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
        for problem in problems
    )
