"""The paths of the service: their documentation, scopes and actions."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, TypeVar

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import knnper
from knnper.client.served_model import ServedModel
from knnper.client.service.access import needs
from knnper.client.service.bodies import Bodies, Body, Budget, RequestLimits
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
    predictions_of,
)
from knnper.client.service.errors import RequestError, documented
from knnper.client.service.files import encode_png, is_picture
from knnper.client.service.inputs import Reader, reader_of
from knnper.client.service.metrics import Metrics
from knnper.client.service.session import Current, Workers
from knnper.client.service.tokens import SCOPES, Caller
from knnper.datastore.examples import ExamplesMissingError, NotErasedError, Selection

PICTURE_PATH = "/examples/{example}/image"
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_PICTURE_LINK = {
    "operationId": "picture",
    "parameters": {"example": "$response.body#/examples/0/id"},
    "description": "The model's view of the first of them, if it was kept.",
}
_Id = Annotated[
    int, Path(description="Of the example in the store.", ge=1, le=2**63 - 1)
]
R = TypeVar("R")


@dataclass(frozen=True)
class Service:
    """The parts of a service, and the action of each path."""

    client_name: str
    current: Current
    limits: RequestLimits
    bodies: Bodies
    readers: Workers
    writers: Workers
    metrics: Metrics

    def reader(self, served: ServedModel) -> Reader:
        """Return the reader of requests for a model."""
        names = served.model.class_names or map(str, range(served.store.num_classes))
        features = served.model.card.feature_names
        return reader_of(served.model.spec, tuple(names), self.limits, features)

    async def predict(
        self, request: Request, caller: Annotated[Caller, needs("predict")]
    ) -> Response:
        """Predict the classes of the inputs in a request's body."""

        def predict(served: ServedModel, body: Body, budget: Budget) -> str:
            reader = self.reader(served)
            inputs = reader.inputs(body, budget)
            self.current.require_time_for(len(inputs), budget.seconds)
            began = time.perf_counter()
            prediction = served.predict(inputs)
            self.current.record_speed(len(inputs), time.perf_counter() - began)
            answer = predictions_of(prediction, reader.class_names)
            self.metrics.count_predictions(
                prediction.class_name for prediction in answer.predictions
            )
            return as_json(caller, answer)

        answer = await self._work(request, self.readers, predict)
        return Response(answer, media_type="application/json")

    async def add(self, request: Request) -> Addition:
        """Store the examples in a request's body."""

        def add(served: ServedModel, body: Body, budget: Budget) -> Addition:
            inputs, labels, names = self.reader(served).examples(body, budget)
            self.current.require_time_for(len(inputs), budget.seconds)
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

        return await self._work(request, self.writers, add, changes=True)

    async def delete(self, request: Request) -> Deletion:
        """Delete the examples that a request's body selects."""

        def delete(served: ServedModel, body: Body, _: Budget) -> Deletion:
            selection = self.reader(served).selection(body)
            # The same as are deleted below: only this thread changes the store.
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

        return await self._work(request, self.writers, delete, changes=True)

    async def picture(self, example: _Id) -> Response:
        """Return a stored input as an image."""
        served = self.current.served()

        def encode() -> bytes:
            if not is_picture(served.model.spec):
                raise RequestError(404, "the stored inputs are no pictures")
            try:
                pixels = served.store.inputs(np.array([example], np.int64))[0]
            except ExamplesMissingError as error:
                raise RequestError(404, f"no example has the id {example}") from error
            return encode_png(pixels.numpy())

        return Response(await self.readers.run(encode), media_type="image/png")

    async def health(self) -> Health:
        """Answer that the process runs."""
        return Health()

    async def ready(self) -> Readiness:
        """Answer which model is served; 503 if none is."""
        return Readiness(model=self.current.served().model.fingerprint)

    async def info(self, caller: Annotated[Caller, needs()]) -> Response:
        """Describe the model that is served, and the caller's scopes."""
        served = self.current.served()

        def describe() -> str:
            reader, serving, store = self.reader(served), served.serving, served.store
            contents, names = store.contents(), reader.class_names
            counts = np.bincount(contents.labels, minlength=len(names)).tolist()
            info = Info(
                client=self.client_name,
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
            )
            return info.model_dump_json(exclude=Info.hidden_from(caller))

        return Response(await self.readers.run(describe), media_type="application/json")

    async def prometheus(self) -> Response:
        """Return the metrics."""
        text = await self.readers.run(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _work(
        self,
        request: Request,
        workers: Workers,
        action: Callable[[ServedModel, Body, Budget], R],
        *,
        changes: bool = False,
    ) -> R:
        """Read a request's body, and run ``action`` with it in a thread."""
        served = self.current.served()
        async with self.bodies.read(request) as body:
            work = functools.partial(action, served, body, Budget(self.limits))
            return await workers.run(work, changes=changes)


def routes(service: Service) -> APIRouter:
    """Declare all paths.

    Endpoints read bodies themselves (`Service._work`): FastAPI would read and parse a
    body before it looks at the caller's scopes, and in the event loop.
    """
    router = APIRouter()
    errors = documented(400, 401, 403, 408, 409, 413, 415, 422, 503, 507)
    router.post(
        "/predict",
        tags=["predictions"],
        response_model=Predictions,
        responses=documented(400, 401, 403, 408, 413, 415, 422, 503),
        summary="Predict the classes of one or many inputs",
        description="All inputs of a request are answered from one state of model and "
        "store.",
    )(service.predict)
    router.post(
        "/examples",
        tags=["examples"],
        responses={200: {"links": {"picture": _PICTURE_LINK}}, **errors},
        summary="Store examples",
        description="When this answers they are on disk, and every later prediction "
        "searches among them.",
        dependencies=[needs("add")],
    )(service.add)
    router.delete(
        "/examples",
        tags=["examples"],
        responses={status: errors[status] for status in errors if status != 507},
        summary="Delete examples, and every trace of them",
        description="The examples that match all given fields. The store's database "
        "is rewritten, so delete many at once.",
        dependencies=[needs("delete")],
    )(service.delete)
    png = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
    router.get(
        PICTURE_PATH,
        tags=["examples"],
        response_class=Response,
        responses={
            200: {"description": "The input as a PNG file.", "content": png},
            **documented(401, 403, 404, 422, 503),
        },
        summary="Show a stored input",
        dependencies=[needs("read")],
    )(service.picture)
    status = functools.partial(router.get, tags=["status"])
    status("/health", responses=documented(403), summary="Whether the process answers")(
        service.health
    )
    status(
        "/ready", responses=documented(403, 503), summary="Whether the service predicts"
    )(service.ready)
    status(
        "/info",
        response_model=Info,
        responses=documented(401, 403, 503),
        summary="The model that is served, and the token's scopes",
    )(service.info)
    text = {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    status(
        "/metrics",
        name="metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Metrics in Prometheus' text format.",
                "content": text,
            },
            **documented(401, 403, 503),
        },
        summary="Metrics for Prometheus",
        dependencies=[needs("metrics")],
    )(service.prometheus)
    for path, (name, media_type) in _PAGE.items():
        # Read once, at the start.
        content = files("knnper.client.service").joinpath("page", name).read_bytes()
        file = functools.partial(_file, content, media_type)
        router.get(path, name=name, include_in_schema=False)(file)
    return router


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, headers={"content-type": media_type})
