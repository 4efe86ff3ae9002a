"""``GET /health``, ``/ready``, ``/info`` and ``/metrics``."""

import functools

import numpy as np
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import knnper
from client.service.answers import class_names_of
from client.service.desk import Desk
from client.service.documents import (
    AccuracyInfo,
    Health,
    Info,
    Readiness,
    StoreInfo,
)
from client.service.problems import documented
from client.service.served import Served, Serving


def status_routes(desk: Desk) -> APIRouter:
    """Return the paths that say how the service is."""
    router = APIRouter(tags=["status"])

    @router.get(
        "/health",
        response_model=Health,
        responses=documented(403),
        summary="Whether the process answers",
    )
    async def health() -> Health:
        return Health()

    @router.get(
        "/ready",
        response_model=Readiness,
        responses=documented(403, 503),
        summary="Whether the service predicts",
    )
    async def ready() -> Readiness:
        return Readiness(model=desk.holder.current().model.fingerprint)

    @router.get(
        "/info",
        response_model=Info,
        responses=documented(401, 403, 503),
        summary="What is served",
    )
    async def info() -> Info:
        served = desk.holder.current()
        return await desk.readers.run(functools.partial(_info, desk, served))

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
    )
    async def metrics() -> Response:
        text = await desk.readers.run(desk.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _info(desk: Desk, served: Served) -> Info:
    model, serving, reader = (
        served.model,
        served.serving,
        desk.input_reader(served.model),
    )
    names = class_names_of(model.class_names, served.store.num_classes)
    return Info(
        client=desk.client_name,
        version=knnper.__version__,
        model=model.fingerprint,
        class_names=list(names),
        input_shape=list(reader.sent_shape),
        input_type=model.spec.dtype,
        takes_pictures=reader.takes_pictures,
        takes_text=reader.takes_text,
        knn_weight=serving.knn_weight,
        num_neighbors=serving.num_neighbors,
        kernel=serving.kernel,
        kernel_scale=serving.kernel_scale,
        class_prior=serving.class_prior is not None,
        accuracy=_accuracy(serving),
        store=_store(served, names),
    )


def _accuracy(serving: Serving) -> AccuracyInfo:
    found = serving.accuracy
    return AccuracyInfo(
        global_model=found.global_model,
        knn=found.knn,
        mixed=found.mixed,
        num_examples=found.num_examples,
        measured_on=found.measured_on,
    )


def _store(served: Served, names: tuple[str, ...]) -> StoreInfo:
    store = served.store
    contents = store.contents()
    counts = np.bincount(contents.labels, minlength=len(names))
    return StoreInfo(
        num_stored=len(contents),
        capacity=store.capacity,
        policy=store.settings.policy,
        index=store.settings.index.name,
        num_by_class=dict(zip(names, counts.tolist(), strict=True)),
    )
