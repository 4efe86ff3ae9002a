"""The paths of the service: what each does, who may use it, and its documentation.

An endpoint's parameters are checked in their order: first the caller's scopes, then
whether a model is served. Bodies are read afterwards (`Bodies`): FastAPI would read and
parse a declared body before anything else, and on the thread of all connections.

A new path is a function with a decorator of `router`: its scope is `needs`, its answer
a model of `documents`, its errors are `documented`, and work with model or store runs
in `Service.readers`, a change of the store in `Service.writers`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from prometheus_client import CONTENT_TYPE_LATEST

import knnper
from knnper.audit_log import Recorder
from knnper.client.served_model import ServedModel
from knnper.client.service.access import needs
from knnper.client.service.bodies import Bodies, Budget, RequestLimits
from knnper.client.service.documents import (
    Addition,
    Deletion,
    Health,
    Info,
    Predictions,
    Readiness,
    StoredExample,
    StoreInfo,
    as_json,
    info_as_json,
    predictions_of,
    privacy_of,
    private_predictions_of,
)
from knnper.client.service.errors import RequestError, documented
from knnper.client.service.files import encode_png, is_picture
from knnper.client.service.inputs import RequestReader, request_reader
from knnper.client.service.metrics import Metrics
from knnper.client.service.session import ModelWatcher, Workers
from knnper.client.service.tokens import SCOPES, Caller
from knnper.datastore.examples import ExamplesMissingError, NotErasedError, Selection

PICTURE_PATH = "/examples/{example}/image"
JSON_RESPONSE = "application/json"
_PICTURE_LINK = {
    "operationId": "picture",
    "parameters": {"example": "$response.body#/examples/0/id"},
    "description": "The model's view of the first of them, if it was kept.",
}
_PICTURE = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
_TEXT = {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}

_PAGE = Path(__file__).parent / "page"

router = APIRouter()


@dataclass(frozen=True)
class Service:
    """The parts of a service; the application has it as ``state.service``."""

    client_name: str
    watcher: ModelWatcher
    limits: RequestLimits
    bodies: Bodies
    readers: Workers
    writers: Workers
    metrics: Metrics
    record: Recorder

    def reader(self, served: ServedModel) -> RequestReader:
        """Return the reader of requests for a model."""
        names = served.model.class_names or map(str, range(served.store.num_classes))
        features = served.model.card.feature_names
        return request_reader(served.model.spec, tuple(names), self.limits, features)


async def _get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


OfService = Annotated[Service, Depends(_get_service)]


async def _get_served(service: OfService) -> ServedModel:
    return service.watcher.served()


# The served model; 503 if there is none.
Served = Annotated[ServedModel, Depends(_get_served)]
# The id in the path of a stored example.
ExampleId = Annotated[
    int, PathParameter(description="Of the example in the store.", ge=1, le=2**63 - 1)
]


@router.post(
    "/predict",
    tags=["predictions"],
    response_model=Predictions,
    responses=documented(400, 401, 403, 408, 413, 415, 422, 503),
)
async def predict(
    caller: Annotated[Caller, needs("predict")],
    served: Served,
    service: OfService,
    request: Request,
) -> Response:
    """Predict the classes of one or many inputs.

    All inputs of a request are answered from one state of model and store.
    """
    async with service.bodies.read(request) as body:
        budget = Budget(service.limits)
        watcher = service.watcher

        def work() -> str:
            reader = service.reader(served)
            inputs = reader.inputs(body, budget)
            watcher.require_time_for(len(inputs), budget.seconds)
            began = time.perf_counter()
            if served.privacy is None:
                answer = predictions_of(served.predict(inputs), reader.class_names)
            else:
                prediction = served.predict_privately(inputs)
                answer = private_predictions_of(prediction, reader.class_names)
            watcher.record_speed(len(inputs), time.perf_counter() - began)
            service.metrics.count_predictions(
                prediction.class_name for prediction in answer.predictions
            )
            return as_json(caller, answer)

        answer = await service.readers.run(work)
    return Response(answer, media_type=JSON_RESPONSE)


@router.post(
    "/examples",
    tags=["examples"],
    responses={
        200: {"links": {"picture": _PICTURE_LINK}},
        **documented(400, 401, 403, 408, 409, 413, 415, 422, 503, 507),
    },
    dependencies=[needs("add")],
)
async def add(served: Served, service: OfService, request: Request) -> Addition:
    """Store examples.

    When this answers they are on disk, and every later prediction searches among them.
    """
    token = request.state.caller.name
    async with service.bodies.read(request) as body:
        budget = Budget(service.limits)

        def work() -> Addition:
            inputs, labels, names = service.reader(served).examples(body, budget)
            service.watcher.require_time_for(len(inputs), budget.seconds)
            new_names = [name for name in names if name is not None]
            num_taken = len(
                served.store.select(Selection(external_ids=tuple(new_names)))
            )
            num_repeated = len(new_names) - len(set(new_names))
            if num_taken or num_repeated:
                raise RequestError(
                    409,
                    f"found {num_taken} names that are taken and {num_repeated} given "
                    "twice, expected new names; nothing is stored",
                )
            service.record("add_examples", token=token, num_examples=len(inputs))
            added = served.add(inputs, labels, names)
            ids: list[int] = added.ids.tolist()
            return Addition(
                examples=[
                    StoredExample(id=number if number >= 0 else None, kept=number >= 0)
                    for number in ids
                ],
                evicted=added.evicted.tolist(),
                num_stored=len(served.store),
            )

        return await service.writers.run(work, changes=True)


@router.delete(
    "/examples",
    tags=["examples"],
    responses=documented(400, 401, 403, 408, 409, 413, 415, 422, 503),
    dependencies=[needs("delete")],
)
async def delete(served: Served, service: OfService, request: Request) -> Deletion:
    """Delete examples, and every trace of them.

    The examples that match all given fields. The store's database is rewritten, so
    delete many at once.
    """
    token = request.state.caller.name
    async with service.bodies.read(request) as body:

        def work() -> Deletion:
            selection = service.reader(served).selection(body)
            # The same as are deleted below: only this thread changes the store.
            ids: list[int] = served.store.select(selection).tolist()
            message = None
            service.record("delete_examples", token=token, num_examples=len(ids))
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

        return await service.writers.run(work, changes=True)


@router.get(
    PICTURE_PATH,
    tags=["examples"],
    response_class=Response,
    responses={
        200: {"description": "The input as a PNG file.", "content": _PICTURE},
        **documented(401, 403, 404, 422, 503),
    },
    dependencies=[needs("read")],
)
async def picture(served: Served, service: OfService, example: ExampleId) -> Response:
    """Show a stored input as a PNG file."""

    def encode() -> bytes:
        if not is_picture(served.model.spec):
            raise RequestError(404, "the stored inputs are no pictures")
        try:
            pixels = served.store.inputs(np.array([example], np.int64))[0]
        except ExamplesMissingError as error:
            raise RequestError(404, f"no example has the id {example}") from error
        return encode_png(pixels.numpy())

    return Response(await service.readers.run(encode), media_type="image/png")


@router.get(
    "/health",
    tags=["status"],
    responses=documented(403),
)
async def health() -> Health:
    """Answer that the process runs."""
    return Health()


@router.get(
    "/ready",
    tags=["status"],
    responses=documented(403, 503),
)
async def ready(served: Served) -> Readiness:
    """Answer which model is served; 503 if none is."""
    return Readiness(model=served.model.fingerprint)


@router.get(
    "/info",
    tags=["status"],
    response_model=Info,
    responses=documented(401, 403, 503),
)
async def info(
    caller: Annotated[Caller, needs()], served: Served, service: OfService
) -> Response:
    """Describe the model that is served, and the token's scopes."""

    def describe() -> str:
        reader = service.reader(served)
        serving = served.serving
        store = served.store
        contents = store.contents()
        names = reader.class_names
        counts = np.bincount(contents.labels, minlength=len(names)).tolist()
        private = served.private_memory
        info = Info(
            client=service.client_name,
            version=knnper.__version__,
            token=caller.name,
            scopes=[scope for scope in SCOPES if scope in caller.scopes],
            model=served.model.fingerprint,
            class_names=list(names),
            input_shape=list(reader.sent_shape),
            input_type=reader.spec.dtype,
            feature_names=list(reader.feature_names),
            takes_pictures=reader.takes_pictures,
            takes_text=reader.takes_text,
            knn_weight=serving.knn_weight,
            num_neighbors=serving.num_neighbors,
            kernel=serving.kernel,
            kernel_scale=serving.kernel_scale,
            class_prior=serving.class_prior is not None,
            accuracy=serving.accuracy,
            store=StoreInfo(
                num_stored=len(contents),
                capacity=store.capacity,
                policy=store.settings.policy,
                index=store.settings.index.name,
                num_by_class=dict(zip(names, counts, strict=True)),
            ),
            privacy=None if private is None else privacy_of(private),
        )
        return info_as_json(caller, info)

    return Response(await service.readers.run(describe), media_type=JSON_RESPONSE)


@router.get(
    "/metrics",
    tags=["status"],
    response_class=Response,
    responses={
        200: {"description": "Metrics in Prometheus' text format.", "content": _TEXT},
        **documented(401, 403, 503),
    },
    dependencies=[needs("metrics")],
)
async def metrics(service: OfService) -> Response:
    """Return figures for Prometheus."""
    text = await service.readers.run(service.metrics.text)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Return the page of the service."""
    return FileResponse(_PAGE / "index.html")


@router.get("/page.css", include_in_schema=False)
async def page_style() -> FileResponse:
    """Return the style sheet of the page."""
    return FileResponse(_PAGE / "page.css")


@router.get("/page.js", include_in_schema=False)
async def page_script() -> FileResponse:
    """Return the script of the page."""
    return FileResponse(_PAGE / "page.js", media_type="text/javascript")
