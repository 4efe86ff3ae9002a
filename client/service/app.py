"""The application: paths, errors, and what is around them."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

import knnper
from client.service.access import Guard, Metered, SecureHeaders
from client.service.desk import Desk, open_desk
from client.service.endpoints.examples import example_routes
from client.service.endpoints.page import page_routes
from client.service.endpoints.predicting import prediction_routes
from client.service.endpoints.status import status_routes
from client.service.holder import Holder
from client.service.limits import Limits
from client.service.openapi import document
from client.service.problems import (
    as_request_error,
    error_document,
    error_headers,
)
from client.service.served import Served
from knnper.config.errors import KnnPerError

_FOUND = (Match.PARTIAL, Match.FULL)


def make_service(
    client_name: str,
    open_served: Callable[[], Served],
    *,
    token: str | None,
    limits: Limits | None = None,
) -> ASGIApp:
    """Return the service of one client, which opens what is served when it starts.

    Parameters
    ----------
    client_name
        Told to whoever asks.
    open_served
        Opens model and store; tried again and again while it raises a `KnnPerError`.
    token
        That requests must bear; None needs none, and answers this machine only.
    limits
        What a request may cost.
    """
    limits = limits or Limits()
    desk = open_desk(client_name, Holder(open_served, limits.poll_s), limits)
    app = _application(desk)
    openapi = functools.partial(document, app, desk, needs_token=token is not None)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(openapi())

    return SecureHeaders(Metered(Guard(app, token), desk.metrics))


def _application(desk: Desk) -> FastAPI:
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
        lifespan=functools.partial(_lifespan, desk),
    )
    routers = (
        prediction_routes(desk),
        example_routes(desk),
        status_routes(desk),
        page_routes(),
    )
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes]
    app.add_exception_handler(KnnPerError, _answer_known)
    app.add_exception_handler(HTTPException, functools.partial(_answer_http, routes))
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(Exception, _answer_unknown)
    return app


@contextlib.asynccontextmanager
async def _lifespan(desk: Desk, app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
    desk.holder.start()
    try:
        yield
    finally:
        desk.readers.close()
        desk.writers.close()
        desk.holder.close()


def _answer(status: int, message: str) -> JSONResponse:
    content = error_document(status, message).model_dump()
    return JSONResponse(content, status, error_headers(status))


async def _answer_known(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    assert isinstance(error, KnnPerError), "as it is registered"
    known = as_request_error(error)
    return _answer(known.status, str(known))


async def _answer_http(
    routes: Sequence[BaseRoute], request: Request, error: Exception
) -> JSONResponse:
    assert isinstance(error, HTTPException), "as it is registered"
    message = f"{error.detail}: {request.method} {request.url.path}"
    answer = _answer(error.status_code, message)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names only those of the first route with this path.
        answer.headers["allow"] = ", ".join(sorted(_methods(routes, request)))
    return answer


def _methods(routes: Sequence[BaseRoute], request: Request) -> Iterator[str]:
    for route in routes:
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] in _FOUND:
            yield from route.methods or ()


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    assert isinstance(error, RequestValidationError), "as it is registered"
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return _answer(422, f"{place}: {first['msg']}")


async def _answer_unknown(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    return _answer(500, "something went wrong that should not; the log says what")
