"""The web application of the service, and its OpenAPI document."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp

import knnper
from knnper.audit_log import Recorder, record_nothing
from knnper.client.served_model import ServedModel
from knnper.client.service import inputs
from knnper.client.service.access import Guard
from knnper.client.service.audit import RequestCounts
from knnper.client.service.bodies import FORM, FORM_FIELD, Bodies, RequestLimits
from knnper.client.service.endpoints import PICTURE_PATH, Service, router
from knnper.client.service.errors import RequestError, error_response, handle_error
from knnper.client.service.metrics import Metered, Metrics
from knnper.client.service.session import ModelWatcher, Workers
from knnper.client.service.tokens import Tokens
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.errors import KnnPerError

Schema = dict[str, Any]
_MATCHES = (Match.PARTIAL, Match.FULL)
_BINARY: Schema = {"type": "string", "format": "binary"}
_SCHEMAS = "#/components/schemas/{model}"


def make_service(
    client_name: str,
    open_served: Callable[[], ServedModel],
    *,
    tokens: Tokens | None,
    limits: RequestLimits | None = None,
    record: Recorder = record_nothing,
    privacy: PrivateAnswerSettings | None = None,
) -> ASGIApp:
    """Build the service of one client.

    Parameters
    ----------
    open_served
        Opens the served model. It is called after the start, until it succeeds.
    tokens
        Tokens that are accepted; None answers this machine alone.
    privacy
        Settings of private answers, with which ``open_served`` opens the model.
    record
        Records changes of the memory, and hourly counts of requests.
    """
    limits = limits or RequestLimits()
    watcher = ModelWatcher(open_served, limits.poll_s)
    readers = Workers("predict", limits.num_readers, limits.max_waiting, limits.seconds)
    writers = Workers("store", 1, limits.max_waiting, limits.seconds)
    metrics = Metrics(watcher)
    counts = RequestCounts(record)
    service = Service(
        client_name, watcher, limits, Bodies(limits), readers, writers, metrics, record
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watcher.start()
        try:
            yield
        finally:
            counts.record()
            readers.close()
            writers.close()
            watcher.close()

    app = FastAPI(
        title="knnper",
        version=knnper.__version__,
        description="Predictions of one client: a global model and the client's own "
        "examples, mixed.",
        # FastAPI's own pages would load scripts from other sites.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.is_private = privacy is not None
    app.include_router(router)
    app.add_exception_handler(HTTPException, _handle_http_error)
    for kind in (KnnPerError, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle_error)

    @app.get("/openapi.json", include_in_schema=False)
    async def describe() -> JSONResponse:
        return JSONResponse(_describe(app, service, needs_token=tokens is not None))

    return Metered(Guard(app, tokens), metrics, counts)


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "the only kind it is registered for"
    headers = {}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names only the methods of the first route with this path.
        methods = {
            method
            for route in (*router.routes, *request.app.routes)
            if isinstance(route, APIRoute)
            and route.matches(request.scope)[0] in _MATCHES
            for method in route.methods or ()
        }
        headers = {"allow": ", ".join(sorted(methods))}
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(error.status_code, message, headers)


def _describe(app: FastAPI, service: Service, *, needs_token: bool) -> Schema:
    """Build the OpenAPI document; bodies are described for the model now served."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    paths = document["paths"]
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    prediction: type[BaseModel] = inputs.PredictionRequest
    addition: type[BaseModel] = inputs.AdditionRequest
    deletion: type[BaseModel] = inputs.DeletionRequest
    media_types: tuple[str, ...] = (
        inputs.JSON,
        inputs.NPY,
        *inputs.PICTURES,
        FORM,
    )
    with contextlib.suppress(RequestError):  # there is no model yet
        reader = service.reader(service.watcher.served())
        prediction, addition = reader.prediction, reader.addition
        deletion, media_types = reader.deletion, reader.media_types
    _, definitions = models_json_schema(
        [(body, "validation") for body in (prediction, addition, deletion)],
        ref_template=_SCHEMAS,
    )
    schemas |= definitions["$defs"]
    paths["/predict"]["post"]["requestBody"] = _inputs_body(
        _reference(prediction), media_types, service.limits.max_inputs
    )
    paths["/examples"]["post"]["requestBody"] = _body(
        {inputs.JSON: _reference(addition)}
    )
    paths["/examples"]["delete"]["requestBody"] = _body(
        {inputs.JSON: _reference(deletion)}
    )
    if inputs.PICTURES[0] not in media_types:
        del paths[PICTURE_PATH]
        del paths["/examples"]["post"]["responses"]["200"]["links"]
    if not needs_token:
        del document["components"]["securitySchemes"]
        for operations in paths.values():
            for operation in operations.values():
                operation.pop("security", None)
    return document


def _reference(body: type[BaseModel]) -> Schema:
    return {"$ref": _SCHEMAS.format(model=body.__name__)}


def _inputs_body(json: Schema, media_types: Sequence[str], max_inputs: int) -> Schema:
    """Describe all ways to send inputs: as JSON, one file, or files in a form."""
    form: Schema = {
        "type": "object",
        "properties": {
            FORM_FIELD: {
                "type": "array",
                "items": _BINARY,
                "minItems": 1,
                "maxItems": max_inputs,
            }
        },
        "required": [FORM_FIELD],
        "additionalProperties": False,
    }
    schemas = {inputs.JSON: json, FORM: form}
    body = _body({name: schemas.get(name, _BINARY) for name in media_types})
    part_types = ", ".join(name for name in media_types if name not in schemas)
    body["content"][FORM]["encoding"] = {FORM_FIELD: {"contentType": part_types}}
    return body


def _body(schema_by_type: Schema) -> Schema:
    content = {name: {"schema": schema} for name, schema in schema_by_type.items()}
    return {"required": True, "content": content}
