"""Text that is sent as it is written, or as the ids of its characters."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from knnper.data.text import encode
from tests.client.service.small_service import TEXT, asking, small_served
from tests.client.service.some_requests import JSON, NPY, npy, post, refused

WORDS = "To be, or not"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("served") / "store"
    with asking(small_served(folder, spec=TEXT)) as client:
        yield client


def predicted(client: httpx.Client, given: Any) -> httpx.Response:
    return client.post("/predict", json={"inputs": [given]})


def test_text_and_its_ids_are_the_same_question(client: httpx.Client) -> None:
    ids = encode(WORDS)[-6:]
    of_text = predicted(client, {"text": WORDS})
    of_ids = predicted(client, ids.tolist())
    of_file = post(client, npy(ids), NPY)
    assert of_text.status_code == 200, of_text.text
    assert of_text.json() == of_ids.json() == of_file.json()
    assert len(of_text.json()["predictions"][0]["probabilities"]) == 81


def test_curly_quotation_marks_are_plain_ones(client: httpx.Client) -> None:
    curly = predicted(client, {"text": "\u201cIs\u2019t you\u201d"})
    assert curly.json() == predicted(client, {"text": '"Is\'t you"'}).json()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "short"}, "at least 6"),
        ({"text": 3}, "inputs.0.text"),
        ({"image": "abc"}, "inputs.0.image"),
        ([0, 1, 2, 3, 4, 81], "inputs.0.5"),
        ([0, 1, 2], "at least 6"),
        ([0, 1, 2, 3, 4, 0.5], "0.5"),
    ],
)
def test_other_inputs_are_refused(
    client: httpx.Client, given: Any, message: str
) -> None:
    refused(predicted(client, given), 422, message)


def test_what_is_taught_as_text_is_a_neighbour(client: httpx.Client) -> None:
    example = {"input": {"text": WORDS}, "label": "' '", "name": "hamlet"}
    added = client.post("/examples", json={"examples": [example]})
    assert added.status_code == 200, added.text
    answer = predicted(client, {"text": WORDS}).json()
    nearest = answer["predictions"][0]["neighbors"][0]
    assert (nearest["name"], nearest["class_name"]) == ("hamlet", "' '")


def test_what_is_taken_is_told(client: httpx.Client) -> None:
    info = client.get("/info").json()
    assert (info["input_type"], info["input_shape"]) == ("token", [6])
    assert (info["takes_pictures"], info["takes_text"]) == (False, True)
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    ids, text = schemas["PredictionRequest"]["properties"]["inputs"]["items"]["anyOf"]
    content = document["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert text == {"$ref": "#/components/schemas/Text"}
    assert schemas["Text"]["properties"]["text"]["minLength"] == 6
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 80}
    assert set(content) == {JSON, NPY, "multipart/form-data"}
