"""``POST`` and ``DELETE /examples``, and a stored example's picture."""

import functools
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path, Request, Response

from client.service.answers import class_names_of
from client.service.body import Body, read_body
from client.service.desk import Desk
from client.service.documents import Addition, Deletion, StoredExample
from client.service.example_requests import SentExamples, read_examples, read_selection
from client.service.pictures import encode_png, is_picture
from client.service.problems import RequestError, documented
from client.service.served import Served
from datastore.errors import ExamplesMissingError, NotErasedError
from datastore.examples import Selection

_PICTURE_LINK = {
    "operationId": "picture",
    "parameters": {"example": "$response.body#/examples/0/id"},
    "description": "What the model sees of the first of them, if it was kept.",
}
_ID = Path(description="Of the example in the store.", ge=1, le=2**63 - 1)


def example_routes(desk: Desk) -> APIRouter:
    """Return the paths that change the memory, and that show what is in it."""
    router = APIRouter(tags=["examples"])
    errors = documented(400, 401, 403, 408, 409, 413, 415, 422, 503, 507)

    @router.post(
        "/examples",
        response_model=Addition,
        responses={200: {"links": {"picture": _PICTURE_LINK}}, **errors},
        summary="Store examples",
        description="When this answers they are on disk, and every later prediction "
        "searches among them.",
    )
    async def add(request: Request) -> Addition:
        served = desk.holder.current()
        body = await read_body(request, desk.limits)
        return await desk.writers.run(functools.partial(_add, desk, served, body))

    @router.delete(
        "/examples",
        response_model=Deletion,
        responses={status: errors[status] for status in errors if status != 507},
        summary="Delete examples, and every trace of them",
        description="Those that everything which is given describes. The store's "
        "database is written anew, so delete many at once.",
    )
    async def delete(request: Request) -> Deletion:
        served = desk.holder.current()
        body = await read_body(request, desk.limits)
        return await desk.writers.run(functools.partial(_delete, served, body))

    @router.get(
        "/examples/{example}/image",
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
    )
    async def picture(example: Annotated[int, _ID]) -> Response:
        served = desk.holder.current()
        png = await desk.readers.run(functools.partial(_picture, served, example))
        return Response(png, media_type="image/png")

    return router


def _names(served: Served) -> tuple[str, ...]:
    return class_names_of(served.model.class_names, served.store.num_classes)


def _add(desk: Desk, served: Served, body: Body) -> Addition:
    sent = read_examples(body, desk.input_reader(served.model), _names(served))
    _require_new_names(served, sent)
    added = served.add(sent.inputs, sent.labels, sent.names)
    ids: list[int] = added.ids.tolist()
    return Addition(
        examples=[
            StoredExample(id=one if one >= 0 else None, kept=one >= 0) for one in ids
        ],
        evicted=added.evicted.tolist(),
        num_stored=len(served.store),
    )


def _require_new_names(served: Served, sent: SentExamples) -> None:
    """Tell taken names apart from what else may be wrong with examples."""
    names = [name for name in sent.names if name is not None]
    taken = served.store.select(Selection(external_ids=tuple(names)))
    if len(taken) or len(set(names)) < len(names):
        raise RequestError(
            409,
            f"found {len(taken)} names that are taken and "
            f"{len(names) - len(set(names))} that are given twice, expected new ones; "
            "nothing was stored",
        )


def _delete(served: Served, body: Body) -> Deletion:
    selection = read_selection(body, _names(served))
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


def _picture(served: Served, example: int) -> bytes:
    spec = served.model.spec
    if not is_picture(spec.image_shape, spec.dtype):
        raise RequestError(404, "the stored inputs are no pictures")
    try:
        pixels = served.store.inputs(np.array([example], np.int64))[0]
    except ExamplesMissingError as error:
        raise RequestError(404, f"no example has the id {example}") from error
    return encode_png(pixels.numpy())
