"""The web application of the service: middleware, errors, its OpenAPI description."""

import contextlib
import functools
import ipaddress
import logging
import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

import knnper
from knnper.client.served_model import ServedModel
from knnper.client.service import inputs
from knnper.client.service.access import Guard, Tokens
from knnper.client.service.endpoints import PICTURE_PATH, Service, routes
from knnper.client.service.session import Current, Metered, Metrics, Workers
from knnper.client.settings import ServiceSettings
from knnper.errors import KnnPerError, RunError
from knnper.transport.sockets import Server, SocketLimits, listen

Schema = dict[str, Any]
_FOUND = (Match.PARTIAL, Match.FULL)
_BINARY: Schema = {"type": "string", "format": "binary"}
_SCHEMAS = "#/components/schemas/{model}"


def make_service(
    client_name: str,
    open_served: Callable[[], ServedModel],
    *,
    tokens: Tokens | None,
    limits: inputs.Limits | None = None,
) -> ASGIApp:
    """Return the service of one client, which opens what is served when it starts."""
    limits = limits or inputs.Limits()
    current = Current(open_served, limits.poll_s)
    readers, writers = (
        Workers(name, count, limits.max_waiting, limits.seconds)
        for name, count in (("predict", limits.num_readers), ("store", 1))
    )
    bodies, metrics = inputs.Bodies(limits), Metrics(current)
    service = Service(client_name, current, limits, bodies, readers, writers, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        current.start()
        try:
            yield
        finally:
            readers.close()
            writers.close()
            current.close()

    app = FastAPI(
        title="knnper",
        version=knnper.__version__,
        description="Predictions of one client: a global model and the client's own "
        "examples, mixed.",
        # The pages of FastAPI load scripts from elsewhere.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    router = routes(service)
    app.include_router(router)
    answer_http = functools.partial(_answer_http, router.routes)
    app.add_exception_handler(HTTPException, answer_http)
    for kind in (KnnPerError, RequestValidationError, Exception):
        app.add_exception_handler(kind, inputs.answer_error)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        found = _description(app, service, needs_token=tokens is not None)
        return JSONResponse(found)

    return Metered(Guard(app, tokens), metrics)


async def _answer_http(
    all_routes: Sequence[BaseRoute], request: Request, error: Exception
) -> JSONResponse:
    assert isinstance(error, HTTPException), "as it is registered"
    headers = {}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names only those of the first route with this path.
        methods = {
            method
            for route in all_routes
            if isinstance(route, APIRoute) and route.matches(request.scope)[0] in _FOUND
            for method in route.methods or ()
        }
        headers = {"allow": ", ".join(sorted(methods))}
    message = f"{error.detail}: {request.method} {request.url.path}"
    return inputs.answer(error.status_code, message, headers)


def _description(app: FastAPI, service: Service, *, needs_token: bool) -> Schema:
    """Return the OpenAPI document, which says what the model of now takes."""
    # Endpoints read their bodies themselves: FastAPI would parse them before anybody
    # has looked at the scopes and the size, and while no other request is answered.
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    paths, schemas = found["paths"], found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    bodies: tuple[type[Any], ...]
    bodies = (inputs.PredictionRequest, inputs.AdditionRequest, inputs.DeletionRequest)
    media_types: tuple[str, ...] = (
        inputs.JSON,
        inputs.NPY,
        *inputs.PICTURES,
        inputs.FORM,
    )
    with contextlib.suppress(inputs.RequestError):  # before there is a model
        reader = service.reader(service.current.served())
        bodies = (reader.prediction, reader.addition, reader.deletion)
        media_types = reader.media_types
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_SCHEMAS
    )
    schemas |= definitions["$defs"]
    sent = [{"$ref": _SCHEMAS.format(model=body.__name__)} for body in bodies]
    paths["/predict"]["post"]["requestBody"] = _any_body(
        sent[0], media_types, service.limits.max_inputs
    )
    paths["/examples"]["post"]["requestBody"] = _body({inputs.JSON: sent[1]})
    paths["/examples"]["delete"]["requestBody"] = _body({inputs.JSON: sent[2]})
    if inputs.PICTURES[0] not in media_types:
        del paths[PICTURE_PATH]
        del paths["/examples"]["post"]["responses"]["200"]["links"]
    if not needs_token:
        del found["components"]["securitySchemes"]
        for operations in paths.values():
            for operation in operations.values():
                operation.pop("security", None)
    return found


def _any_body(sent: Schema, media_types: Sequence[str], most: int) -> Schema:
    """Return all ways to send inputs: as JSON, a file, or files in a form."""
    files = {"type": "array", "items": _BINARY, "minItems": 1, "maxItems": most}
    form: Schema = {
        "type": "object",
        "properties": {inputs.FORM_FIELD: files},
        "required": [inputs.FORM_FIELD],
        "additionalProperties": False,
    }
    special = {inputs.JSON: sent, inputs.FORM: form}
    body = _body({name: special.get(name, _BINARY) for name in media_types})
    types = ", ".join(name for name in media_types if name not in special)
    body["content"][inputs.FORM]["encoding"] = {
        inputs.FORM_FIELD: {"contentType": types}
    }
    return body


def _body(by_type: Schema) -> Schema:
    content = {name: {"schema": schema} for name, schema in by_type.items()}
    return {"required": True, "content": content}


_STOPPING_S = 30
_BETWEEN_NOTICES_S = 60
_LOG = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for sure."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    app: ASGIApp,
    binding: ServiceSettings,
    on_listening: Callable[[str], None],
    limits: SocketLimits | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT; what has begun is finished first."""
    server = make_server(app, binding, limits)
    with listen(
        binding.host,
        binding.port,
        "choose another `service.port` or `service.host`, or stop what listens there",
    ) as listener:
        host, port = listener.getsockname()[:2]
        scheme = "http" if binding.tls is None else "https"
        shown = f"[{host}]" if ":" in host else host
        on_listening(f"{scheme}://{shown}:{port}")
        # Once stopped, uvicorn raises the signal again, for whoever had it before.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def make_server(
    app: ASGIApp, binding: ServiceSettings, limits: SocketLimits | None = None
) -> Server:
    """Return what serves the application on sockets that listen."""
    tls = binding.tls
    certificate, key = (tls.certificate, tls.key) if tls else (None, None)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=_STOPPING_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        return Server(config, limits or SocketLimits(), _Notices().ended)
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"TLS cannot be used with {certificate} and {key}: {error}; "
            "expected a certificate and its key, as PEM files that can be read"
        ) from error


class _Notices:
    """Says once a minute how many connections were ended, and why."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._next = 0.0

    def ended(self, address: str, why: str) -> None:
        self._ended[why] += 1
        if time.monotonic() > self._next:
            for reason, count in self._ended.items():
                _LOG.warning(
                    "connections ended: %d, the last of %s: %s", count, address, reason
                )
            self._ended.clear()
            self._next = time.monotonic() + _BETWEEN_NOTICES_S
