"""The paths of the service, what each needs, and what it does."""

import functools
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

import knnper
from knnper.client.served_model import ServedModel
from knnper.client.service.access import SCOPES, Caller, Scope, needs
from knnper.client.service.inputs import (
    Bodies,
    Body,
    Budget,
    Limits,
    Reader,
    RequestError,
    documented,
    is_picture,
    reader_of,
)
from knnper.client.service.session import Current, Metrics, Workers
from knnper.client.state import Accuracy
from knnper.data.examples import InputDtype
from knnper.datastore.examples import ExamplesMissingError, NotErasedError, Selection
from knnper.datastore.prediction import Prediction

R = TypeVar("R")


class Document(BaseModel):
    """Base of every answer."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def hidden_from(cls, caller: Caller) -> dict[str, Any]:
        """Return the fields that the caller's scopes do not give."""
        return {
            name: True
            for name, field in cls.model_fields.items()
            if isinstance(field.json_schema_extra, dict)
            and field.json_schema_extra["x-scope"] not in caller.scopes
        }


def given_to(scope: Scope, description: str) -> Any:
    """Return a field of an answer that only a token with the scope is given."""
    extra: dict[str, Any] = {"x-scope": scope}
    return Field(default=None, description=description, json_schema_extra=extra)


_Shares = dict[str, float] | None


class NeighborDocument(Document):
    """A stored example that had a say."""

    id: int = Field(description="Of the example in the store; never given twice.")
    name: str | None = Field(description="The owner's name for it, if there is one.")
    label: int = Field(description="Number of its class.")
    class_name: str = Field(description="Name of its class.")
    distance: float = Field(description="Euclidean, between the embeddings.")
    weight: float = Field(description="Its share of the vote; all sum to 1.")


class InputPrediction(Document):
    """The prediction for one input; what the token's scopes do not give is left out."""

    label: int = Field(description="Number of the most probable class.")
    class_name: str = Field(description="Name of the most probable class.")
    probabilities: _Shares = given_to(
        "probabilities", "By class: what is predicted, λ·p_kNN + (1 - λ)·p_global."
    )
    global_probabilities: _Shares = given_to(
        "neighbors", "By class: what the global model says."
    )
    adapted_probabilities: _Shares = given_to(
        "neighbors",
        "By class: what the global model says, given how often each class "
        "is stored; it is p_global where there is such a class prior, else null.",
    )
    knn_probabilities: _Shares = given_to(
        "neighbors", "By class: what the neighbours say; null where none are stored."
    )
    neighbors: list[NeighborDocument] | None = given_to("neighbors", "Nearest first.")


class Predictions(Document):
    """Predictions for all inputs of a request, from one state of model and store."""

    predictions: list[InputPrediction] = Field(description="One an input, in order.")
    model: str = Field(description="Fingerprint of the model that was used.")
    knn_weight: float | None = given_to(
        "neighbors", "λ as it was used: 0 with an empty store."
    )
    num_stored: int | None = given_to(
        "neighbors", "Examples in the store that was searched."
    )


class StoredExample(Document):
    """What became of one example that was sent."""

    id: int | None = Field(description="In the store; null if it was not kept.")
    kept: bool = Field(description="Whether the store's policy kept it.")


class Addition(Document):
    """What became of the examples; they are on disk."""

    examples: list[StoredExample] = Field(description="One each, in order.")
    evicted: list[int] = Field(description="Ids of those that made room.")
    num_stored: int = Field(description="Examples in the store afterwards.")


class Deletion(Document):
    """What was deleted; it is never found again."""

    deleted: list[int] = Field(description="Ids of the examples.")
    erased: bool = Field(
        description="Whether no byte of them is left in the store's files."
    )
    message: str | None = Field(
        description="Why some bytes may be left, and till when."
    )
    num_stored: int = Field(description="Examples in the store afterwards.")


class Health(Document):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Document):
    """The service predicts."""

    status: Literal["ready"] = "ready"
    model: str = Field(description="Fingerprint of the model that is served.")


class StoreInfo(Document):
    """The client's memory."""

    num_stored: int = Field(description="Examples.")
    capacity: int | None = Field(description="The most; null is not bounded.")
    policy: str = Field(description="What stays when new examples arrive.")
    index: str = Field(description="How the nearest are found.")
    num_by_class: dict[str, int] = Field(description="Examples of each class.")


class Info(Document):
    """What is served; what the token's scopes do not give is left out."""

    client: str = Field(description="The client's name.")
    version: str = Field(description="Of this software.")
    token: str = Field(description="The name of the token that asks.")
    scopes: list[str] = Field(description="What it may.")
    model: str = Field(description="Fingerprint of the model that is served.")
    class_names: list[str] = Field(description="In the order of their numbers.")
    input_shape: list[int] = Field(description="How an input's lists are nested.")
    input_type: InputDtype = Field(
        description="Of the numbers in an input; token: ids of characters."
    )
    feature_names: list[str] = Field(
        description="Of the numbers in an input, in order; empty where it has no names."
    )
    takes_pictures: bool = Field(description="Whether PNG and JPEG files are taken.")
    takes_text: bool = Field(description="Whether text is taken.")
    knn_weight: float | None = given_to("neighbors", "λ, the weight of the neighbours.")
    num_neighbors: int | None = given_to(
        "neighbors", "k, how many neighbours have a say."
    )
    kernel: str | None = given_to("neighbors", "How a neighbour's distance counts.")
    kernel_scale: float | None = given_to(
        "neighbors", "The scale of the distances, sigma."
    )
    class_prior: bool | None = given_to(
        "neighbors",
        "Whether the global model is adapted to how often each class is stored.",
    )
    accuracy: Accuracy | None = given_to("neighbors", "As measured when λ was chosen.")
    store: StoreInfo | None = given_to("read", "The client's memory.")


def predictions(prediction: Prediction, class_names: Sequence[str]) -> Predictions:
    """Return the document of predictions for n inputs."""

    def by_class(probabilities: Tensor | None) -> Sequence[_Shares]:
        if probabilities is None:
            return [None] * len(labels)
        return [
            dict(zip(class_names, row, strict=True)) for row in probabilities.tolist()
        ]

    # They are our own numbers, which need not be validated one by one.
    vote, near = prediction.vote, prediction.vote.neighbors
    labels: list[int] = prediction.labels.tolist()
    distances, weights = near.squared_distances.sqrt().tolist(), vote.weights.tolist()
    columns = near.ids.tolist(), vote.names, near.labels.tolist(), distances, weights
    neighbors = [
        [
            NeighborDocument.model_construct(
                id=one,
                name=name,
                label=label,
                class_name=class_names[label],
                distance=distance,
                weight=weight,
            )
            for one, name, label, distance, weight in zip(*row, strict=True)
        ]
        for row in zip(*columns, strict=True)
    ]
    shares = (
        prediction.probabilities,
        prediction.global_probabilities,
        prediction.adapted_probabilities,
        vote.probabilities,
    )
    rows = zip(labels, *map(by_class, shares), neighbors, strict=True)
    return Predictions.model_construct(
        predictions=[
            InputPrediction.model_construct(
                label=label,
                class_name=class_names[label],
                probabilities=mixed,
                global_probabilities=alone,
                adapted_probabilities=adapted,
                knn_probabilities=knn,
                neighbors=those,
            )
            for label, mixed, alone, adapted, knn, those in rows
        ],
        model=vote.fingerprint,
        knn_weight=prediction.knn_weight,
        num_stored=vote.num_stored,
    )


def shown_to(caller: Caller, answer: Predictions) -> str:
    """Return predictions as JSON, as far as the caller may see them."""
    of_each = {"__all__": InputPrediction.hidden_from(caller)}
    return answer.model_dump_json(
        exclude=Predictions.hidden_from(caller) | {"predictions": of_each}
    )


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


@dataclass(frozen=True)
class Service:
    """One service's parts, and what it does for each of its paths."""

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
        features = served.model.card.feature_names
        return reader_of(served.model.spec, tuple(names), self.limits, features)

    async def predict(
        self, request: Request, caller: Annotated[Caller, needs("predict")]
    ) -> Response:
        """Answer with the classes of the inputs in a request's body."""

        def do(served: ServedModel, body: Body, budget: Budget) -> str:
            reader = self.reader(served)
            inputs = reader.inputs(body, budget)
            self.current.require_time_for(len(inputs), budget.seconds)
            began = time.perf_counter()
            prediction = served.predict(inputs)
            self.current.took(len(inputs), time.perf_counter() - began)
            answer = predictions(prediction, reader.class_names)
            self.metrics.predicted(one.class_name for one in answer.predictions)
            return shown_to(caller, answer)

        answer = await self._work(request, self.readers, do)
        return Response(answer, media_type="application/json")

    async def add(self, request: Request) -> Addition:
        """Store the examples in a request's body."""

        def do(served: ServedModel, body: Body, budget: Budget) -> Addition:
            inputs, labels, names = self.reader(served).examples(body, budget)
            self.current.require_time_for(len(inputs), budget.seconds)
            given = [name for name in names if name is not None]
            taken = len(served.store.select(Selection(external_ids=tuple(given))))
            twice = len(given) - len(set(given))
            if taken or twice:
                found = f"found {taken} names that are taken and {twice} given twice"
                raise RequestError(
                    409, f"{found}, expected new ones; nothing is stored"
                )
            added = served.add(inputs, labels, names)
            ids: list[int] = added.ids.tolist()
            return Addition(
                examples=[
                    StoredExample(id=one if one >= 0 else None, kept=one >= 0)
                    for one in ids
                ],
                evicted=added.evicted.tolist(),
                num_stored=len(served.store),
            )

        return await self._work(request, self.writers, do, changes=True)

    async def delete(self, request: Request) -> Deletion:
        """Delete the examples that a request's body describes."""

        def do(served: ServedModel, body: Body, _: Budget) -> Deletion:
            selection = self.reader(served).selection(body)
            # Only this thread changes the store, so these are the ones.
            ids: list[int] = served.store.select(selection).tolist()
            message = None
            try:
                served.delete(selection)
            except NotErasedError as error:
                message = str(error)
            is_erased, left = message is None, len(served.store)
            return Deletion(
                deleted=ids, erased=is_erased, message=message, num_stored=left
            )

        return await self._work(request, self.writers, do, changes=True)

    async def picture(self, example: _Id) -> Response:
        """Answer with what the model sees of a stored example."""
        served = self.current.served()

        def do() -> bytes:
            if not is_picture(served.model.spec):
                raise RequestError(404, "the stored inputs are no pictures")
            try:
                pixels = served.store.inputs(np.array([example], np.int64))[0]
            except ExamplesMissingError as error:
                raise RequestError(404, f"no example has the id {example}") from error
            return encode_png(pixels.numpy())

        return Response(await self.readers.run(do), media_type="image/png")

    async def health(self) -> Health:
        """Answer: the process does."""
        return Health()

    async def ready(self) -> Readiness:
        """Answer which model is served, if one is."""
        return Readiness(model=self.current.served().model.fingerprint)

    async def told(self, caller: Annotated[Caller, needs()]) -> Response:
        """Answer what is served, and what the caller may."""
        served = self.current.served()
        reader, names = self.reader(served), self.reader(served).class_names

        def do() -> str:
            serving, store = served.serving, served.store
            contents = store.contents()
            counts = np.bincount(contents.labels, minlength=len(names)).tolist()
            found = Info(
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
            return found.model_dump_json(exclude=Info.hidden_from(caller))

        shown = await self.readers.run(do)
        return Response(shown, media_type="application/json")

    async def figures(self) -> Response:
        """Answer with what is counted and measured."""
        text = await self.readers.run(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _work(
        self,
        request: Request,
        workers: Workers,
        do: Callable[[ServedModel, Body, Budget], R],
        *,
        changes: bool = False,
    ) -> R:
        served = self.current.served()
        async with self.bodies.read(request) as body:
            begun = functools.partial(do, served, body, Budget(self.limits))
            return await workers.run(begun, changes=changes)


def routes(service: Service) -> APIRouter:
    """Return all paths."""
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
        description="Those that everything which is given describes. The store's "
        "database is written anew, so delete many at once.",
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
        summary="What is served, and what the token may",
    )(service.told)
    text = {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    status(
        "/metrics",
        name="metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Figures in Prometheus' text format.",
                "content": text,
            },
            **documented(401, 403, 503),
        },
        summary="Figures for Prometheus",
        dependencies=[needs("metrics")],
    )(service.figures)
    for path, (name, media_type) in _PAGE.items():
        # The page needs nothing from elsewhere.
        content = files("knnper.client.service").joinpath("page", name).read_bytes()
        file = functools.partial(_file, content, media_type)
        router.get(path, name=name, include_in_schema=False)(file)
    return router


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, headers={"content-type": media_type})


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file of pixels, uint8 of shape (height, width, 1 or 3)."""
    file = io.BytesIO()
    flat = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    Image.fromarray(np.ascontiguousarray(flat)).save(file, "PNG")
    return file.getvalue()
