"""The OpenAPI document, which says exactly what the model that is served takes."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from client.service.access import PUBLIC_PATHS
from client.service.answers import class_names_of
from client.service.arrays import LARGEST_FLOAT
from client.service.desk import Desk
from client.service.example_requests import DeletionRequest, ExamplesRequest
from client.service.inputs import FORM, FORM_FIELD, JSON, NPY, PICTURES, InputReader
from client.service.problems import RequestError

Schema = dict[str, Any]

PICTURE_PATH = "/examples/{example}/image"

_BINARY: Schema = {"type": "string", "format": "binary"}
PICTURE_FORMAT = "picture-base64"
"""A PNG or JPEG file in base64, as `InputReader.one` takes it."""


def document(app: FastAPI, desk: Desk, *, needs_token: bool) -> Schema:
    """Return the document as of now.

    Parameters
    ----------
    app
        Has the paths.
    desk
        Knows the model, whose inputs and classes are described; without a model inputs
        may be anything.
    needs_token
        Whether requests must bear one.
    """
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    found["components"]["schemas"].pop("HTTPValidationError", None)
    found["components"]["schemas"].pop("ValidationError", None)
    _describe_bodies(found["paths"], desk)
    if not _takes_pictures(desk):
        del found["paths"][PICTURE_PATH]
        del found["paths"]["/examples"]["post"]["responses"]["200"]["links"]
    if needs_token:
        _require_token(found)
    return found


def _describe_bodies(paths: Schema, desk: Desk) -> None:
    one, label, media_types = _described_model(desk)
    most = desk.limits.max_inputs
    inputs = {"type": "array", "items": one, "minItems": 1, "maxItems": most}
    by_type: dict[str, Schema] = {
        JSON: _object({"inputs": inputs}, "inputs"),
        NPY: _BINARY,
        **dict.fromkeys(PICTURES, _BINARY),
        FORM: _object({FORM_FIELD: _several_files(most)}, FORM_FIELD),
    }
    predicting = _body({name: by_type[name] for name in media_types})
    files = ", ".join(name for name in media_types if name not in (JSON, FORM))
    predicting["content"][FORM]["encoding"] = {FORM_FIELD: {"contentType": files}}
    paths["/predict"]["post"]["requestBody"] = predicting
    adding = ExamplesRequest.model_json_schema()
    example = adding.pop("$defs")["ExampleRequest"]
    example["properties"] |= {"input": one, "label": label}
    adding["properties"]["examples"] |= {"items": example, "maxItems": most}
    paths["/examples"]["post"]["requestBody"] = _body({JSON: adding})
    deleting = DeletionRequest.model_json_schema()
    deleting["properties"]["labels"]["items"] = label
    paths["/examples"]["delete"]["requestBody"] = _body({JSON: deleting})


def _takes_pictures(desk: Desk) -> bool:
    """Whether inputs are pictures, as far as is known."""
    try:
        return desk.input_reader(desk.holder.current().model).takes_pictures
    except RequestError:
        return True


def _described_model(desk: Desk) -> tuple[Schema, Schema, tuple[str, ...]]:
    """Return what one input and a label are like, and the types of bodies."""
    try:
        served = desk.holder.current()
    except RequestError:
        return {}, {"type": ["integer", "string"]}, (JSON, NPY, *PICTURES, FORM)
    reader = desk.input_reader(served.model)
    names = class_names_of(served.model.class_names, served.store.num_classes)
    label = {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": len(names) - 1},
            {"type": "string", "enum": list(names)},
        ]
    }
    return _input(reader), label, reader.media_types


def _input(reader: InputReader) -> Schema:
    schema = _number(reader)
    for length in reversed(reader.sent_shape):
        schema = {
            "type": "array",
            "items": schema,
            "minItems": length,
            "maxItems": length,
        }
    if reader.takes_text:
        text = {"type": "string", "minLength": reader.sent_shape[0]}
        return {"anyOf": [_object({"text": text}, "text"), schema]}
    if not reader.takes_pictures:
        return schema
    picture = {
        "type": "string",
        "format": PICTURE_FORMAT,
        "description": "A PNG or JPEG file in base64; its size is changed as needed.",
    }
    return {"anyOf": [_object({"image": picture}, "image"), schema]}


def _number(reader: InputReader) -> Schema:
    """Return what one number of an input is like."""
    spec = reader.spec
    if spec.dtype == "float32":
        return {"type": "number", "minimum": -LARGEST_FLOAT, "maximum": LARGEST_FLOAT}
    largest = 255 if spec.dtype == "uint8" else spec.num_classes - 1
    return {"type": "integer", "minimum": 0, "maximum": largest}


def _several_files(most: int) -> Schema:
    return {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": most}


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _body(by_type: Mapping[str, Schema]) -> Schema:
    content = {name: {"schema": schema} for name, schema in by_type.items()}
    return {"required": True, "content": content}


def _require_token(found: Schema) -> None:
    found["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"}
    }
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in PUBLIC_PATHS else [{"token": []}]
