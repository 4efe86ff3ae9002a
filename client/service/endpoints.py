"""The paths of the service, what each needs, and what it does."""

import functools
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from client.residence.served_model import ServedModel
from client.service.access import Caller, needs
from client.service.answers import (
    Addition,
    Deletion,
    Health,
    Info,
    Predictions,
    Readiness,
    StoredExample,
    encode_png,
    info,
    predictions,
)
from client.service.budget import Bodies, Body, Budget, Limits
from client.service.current import Current, Workers
from client.service.errors import RequestError, documented
from client.service.inputs import Reader, is_picture, reader_of
from client.service.metrics import Metrics
from datastore.errors import ExamplesMissingError, NotErasedError
from datastore.examples import Selection

PICTURE_PATH = "/examples/{example}/image"
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_PICTURE_LINK = {
    "operationId": "picture",
    "parameters": {"example": "$response.body#/examples/0/id"},
    "description": "What the model sees of the first of them, if it was kept.",
}
_Id = Annotated[
    int, Path(description="Of the example in the store.", ge=1, le=2**63 - 1)
]
_AnyCaller = Annotated[Caller, needs()]


@dataclass(frozen=True)
class Service:
    """One service's parts: what is served, what it may cost, who works on it."""

    client_name: str
    current: Current
    limits: Limits
    bodies: Bodies
    readers: Workers
    writers: Workers
    metrics: Metrics

    def reader(self, served: ServedModel) -> Reader:
        """Return what reads that which is sent for a model."""
        names = served.model.class_names or map(str, range(served.store.num_classes))
        return reader_of(served.model.spec, tuple(names), self.limits)


def routes(service: Service) -> tuple[APIRouter, ...]:
    """Return all paths."""
    return (
        _prediction_routes(service),
        _example_routes(service),
        _status_routes(service),
        _page_routes(),
    )


def _prediction_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["predictions"])

    @router.post(
        "/predict",
        response_model=Predictions,
        responses=documented(400, 401, 403, 408, 413, 415, 422, 503),
        summary="Predict the classes of one or many inputs",
        description="All inputs of a request are answered from one state of model and "
        "store.",
    )
    async def predict(
        request: Request, caller: Annotated[Caller, needs("predict")]
    ) -> Response:
        served = service.current.served()
        async with service.bodies.read(request) as body:
            work = functools.partial(
                _predict, service, served, body, Budget(service.limits), caller
            )
            answer = await service.readers.run(work)
        return Response(answer, media_type="application/json")

    return router


def _predict(
    service: Service, served: ServedModel, body: Body, budget: Budget, caller: Caller
) -> str:
    reader = service.reader(served)
    inputs = reader.inputs(body, budget)
    service.current.require_time_for(len(inputs), budget.seconds)
    began = time.perf_counter()
    prediction = served.predict(inputs)
    service.current.took(len(inputs), time.perf_counter() - began)
    answer = predictions(prediction, reader.class_names, caller)
    service.metrics.predicted(one.class_name for one in answer.predictions)
    return answer.model_dump_json(exclude_unset=True)


def _example_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["examples"])
    errors = documented(400, 401, 403, 408, 409, 413, 415, 422, 503, 507)

    @router.post(
        "/examples",
        response_model=Addition,
        responses={200: {"links": {"picture": _PICTURE_LINK}}, **errors},
        summary="Store examples",
        description="When this answers they are on disk, and every later prediction "
        "searches among them.",
        dependencies=[needs("add")],
    )
    async def add(request: Request) -> Addition:
        served = service.current.served()
        async with service.bodies.read(request) as body:
            work = functools.partial(
                _add, service, served, body, Budget(service.limits)
            )
            return await service.writers.run(work, changes=True)

    @router.delete(
        "/examples",
        response_model=Deletion,
        responses={status: errors[status] for status in errors if status != 507},
        summary="Delete examples, and every trace of them",
        description="Those that everything which is given describes. The store's "
        "database is written anew, so delete many at once.",
        dependencies=[needs("delete")],
    )
    async def delete(request: Request) -> Deletion:
        served = service.current.served()
        async with service.bodies.read(request) as body:
            work = functools.partial(_delete, service, served, body)
            return await service.writers.run(work, changes=True)

    @router.get(
        PICTURE_PATH,
        response_class=Response,
        responses={
            200: {
                "description": "The input as a PNG file.",
                "content": {
                    "image/png": {"schema": {"type": "string", "format": "binary"}}
                },
            },
            **documented(401, 403, 404, 422, 503),
        },
        summary="Show a stored input",
        dependencies=[needs("read")],
    )
    async def picture(example: _Id) -> Response:
        served = service.current.served()
        png = await service.readers.run(functools.partial(_picture, served, example))
        return Response(png, media_type="image/png")

    return router


def _add(service: Service, served: ServedModel, body: Body, budget: Budget) -> Addition:
    inputs, labels, names = service.reader(served).examples(body, budget)
    service.current.require_time_for(len(inputs), budget.seconds)
    _require_new_names(served, names)
    added = served.add(inputs, labels, names)
    ids: list[int] = added.ids.tolist()
    return Addition(
        examples=[
            StoredExample(id=one if one >= 0 else None, kept=one >= 0) for one in ids
        ],
        evicted=added.evicted.tolist(),
        num_stored=len(served.store),
    )


def _require_new_names(served: ServedModel, sent: tuple[str | None, ...]) -> None:
    """Tell taken names apart from what else may be wrong with examples."""
    names = [name for name in sent if name is not None]
    taken = served.store.select(Selection(external_ids=tuple(names)))
    if len(taken) or len(set(names)) < len(names):
        raise RequestError(
            409,
            f"found {len(taken)} names that are taken and "
            f"{len(names) - len(set(names))} that are given twice, expected new ones; "
            "nothing was stored",
        )


def _delete(service: Service, served: ServedModel, body: Body) -> Deletion:
    selection = service.reader(served).selection(body)
    # Only this thread changes the store, so these are the ones.
    ids: list[int] = served.store.select(selection).tolist()
    message = None
    try:
        served.delete(selection)
    except NotErasedError as error:
        message = str(error)
    return Deletion(
        deleted=ids,
        erased=message is None,
        message=message,
        num_stored=len(served.store),
    )


def _picture(served: ServedModel, example: int) -> bytes:
    if not is_picture(served.model.spec):
        raise RequestError(404, "the stored inputs are no pictures")
    try:
        pixels = served.store.inputs(np.array([example], np.int64))[0]
    except ExamplesMissingError as error:
        raise RequestError(404, f"no example has the id {example}") from error
    return encode_png(pixels.numpy())


def _status_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get(
        "/health",
        responses=documented(403),
        summary="Whether the process answers",
    )
    async def health() -> Health:
        return Health()

    @router.get(
        "/ready",
        responses=documented(403, 503),
        summary="Whether the service predicts",
    )
    async def ready() -> Readiness:
        return Readiness(model=service.current.served().model.fingerprint)

    @router.get(
        "/info",
        response_model_exclude_unset=True,
        responses=documented(401, 403, 503),
        summary="What is served, and what the token may",
    )
    async def told(caller: _AnyCaller) -> Info:
        served = service.current.served()
        reader = service.reader(served)
        work = functools.partial(info, service.client_name, served, reader, caller)
        return await service.readers.run(work)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Figures in Prometheus' text format.",
                "content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}},
            },
            **documented(401, 403, 503),
        },
        summary="Figures for Prometheus",
        dependencies=[needs("metrics")],
    )
    async def metrics() -> Response:
        text = await service.readers.run(service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _page_routes() -> APIRouter:
    """Return the paths of the page, which needs nothing from elsewhere."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _PAGE.items():
        content = files("client.service").joinpath("page", name).read_bytes()
        answer = functools.partial(_file, content, media_type)
        router.add_api_route(path, answer, methods=["GET"], name=name)
    return router


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, headers={"content-type": media_type})
