"""``POST /predict``."""

import functools

from fastapi import APIRouter, Request, Response

from client.service.answers import class_names_of, predictions
from client.service.body import Body, read_body
from client.service.desk import Desk
from client.service.documents import Predictions
from client.service.problems import documented
from client.service.served import Served


def prediction_routes(desk: Desk) -> APIRouter:
    """Return the path that predicts."""
    router = APIRouter(tags=["predictions"])

    @router.post(
        "/predict",
        response_model=Predictions,
        responses=documented(400, 401, 403, 408, 413, 415, 422, 503),
        summary="Predict the classes of one or many inputs",
        description="All inputs of a request are answered from one state of model and "
        "store.",
    )
    async def predict(request: Request) -> Response:
        served = desk.holder.current()
        body = await read_body(request, desk.limits)
        answer = await desk.readers.run(functools.partial(_predict, desk, served, body))
        return Response(answer, media_type="application/json")

    return router


def _predict(desk: Desk, served: Served, body: Body) -> str:
    inputs = desk.input_reader(served.model).read(body)
    prediction = served.predict(inputs)
    num_classes = prediction.probabilities.shape[1]
    names = class_names_of(served.model.class_names, num_classes)
    answer = predictions(prediction, names)
    desk.metrics.predicted(one.class_name for one in answer.predictions)
    return answer.model_dump_json()
