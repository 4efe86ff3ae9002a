"""Predictions in all the ways they are asked for, and examples that come and go."""

import base64
import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from PIL import Image

from knnper.data.text import encode
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import ClassPrior, ClassPriorSettings
from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    JSON,
    NPY,
    PNG,
    SERVING,
    TEXT,
    SmallServed,
    asking,
    npy,
    png,
    post,
    predicted,
    refused,
    small_served,
    some_inputs,
)


def test_a_prediction_is_that_of_the_model_and_the_memory(
    client: httpx.Client, served: SmallServed
) -> None:
    inputs = some_inputs(1, seed=5)
    answer = predicted(client, *inputs.tolist()).json()
    expected = served.predict(inputs)
    found = answer["predictions"][0]
    assert list(found["probabilities"]) == list(CLASSES)
    assert list(found["probabilities"].values()) == expected.probabilities[0].tolist()
    assert found["label"] == int(expected.labels[0])
    assert found["class_name"] == CLASSES[found["label"]]
    ids = expected.vote.neighbors.ids[0].tolist()
    near = [(one["id"], one["name"]) for one in found["neighbors"]]
    assert near == [(number, f"train/{number - 1:05d}") for number in ids]
    assert sum(one["weight"] for one in found["neighbors"]) == pytest.approx(1)
    assert answer["model"] == served.model.fingerprint
    assert (answer["num_stored"], answer["knn_weight"]) == (9, 0.5)
    assert found["adapted_probabilities"] is None


def test_all_ways_to_send_an_input_are_answered_alike(client: httpx.Client) -> None:
    pixels = some_inputs(1, seed=6)[0]
    file, rows = png(pixels), pixels.numpy()
    bodies: list[dict[str, Any]] = [
        {"json": {"inputs": [pixels.tolist()]}},
        {"json": {"inputs": [{"image": base64.b64encode(file).decode()}]}},
        {"content": file, "headers": {"content-type": PNG}},
        {"content": npy(rows), "headers": {"content-type": NPY}},
        {"content": npy(np.asfortranarray(rows)), "headers": {"content-type": NPY}},
        {"files": {"image": ("a.png", file, "image/png")}},
    ]
    answers = [client.post("/predict", **body).json() for body in bodies]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["predictions"]) == 1
    other = io.BytesIO()
    Image.new("RGBA", (30, 20), (200, 10, 10, 255)).save(other, "PNG")
    assert post(client, other.getvalue(), PNG).status_code == 200, "converted"


def test_many_inputs_are_answered_in_order(client: httpx.Client) -> None:
    inputs = some_inputs(3, seed=7)
    together = predicted(client, *inputs.tolist()).json()
    as_files = [("image", ("a.png", png(one), "image/png")) for one in inputs]
    as_form = client.post("/predict", files=as_files).json()
    assert together == as_form == post(client, npy(inputs.numpy()), NPY).json()
    for one, alone in zip(together["predictions"], inputs, strict=True):
        answer = predicted(client, alone.tolist()).json()
        assert answer["predictions"][0]["label"] == one["label"]


def test_an_empty_memory_answers_as_the_global_model(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store", count=0)) as client:
        answer = predicted(client, *some_inputs(1).tolist()).json()
    found = answer["predictions"][0]
    assert (answer["knn_weight"], answer["num_stored"]) == (0, 0)
    assert (found["neighbors"], found["knn_probabilities"]) == ([], None)
    assert found["probabilities"] == found["global_probabilities"]


def test_features_are_sent_as_rows(tmp_path: Path) -> None:
    row = [0.5, -1, 2.0, 1e30]
    with asking(small_served(tmp_path / "store", spec=FEATURES)) as client:
        info = client.get("/info").json()
        answer = predicted(client, row)
        as_array = post(client, npy(np.array(row)), NPY)
        refused(predicted(client, [0, 0, 0, 1e39]), 422, "inputs.0.3")
        refused(post(client, b"", PNG), 415, "x-npy")
        refused(client.get("/examples/1/image"), 404, "no pictures")
    taken = info["input_shape"], info["input_type"], info["takes_pictures"]
    assert taken == ([4], "float32", False)
    assert answer.status_code == 200, answer.text
    assert as_array.json() == answer.json()


def test_an_answer_names_what_is_mixed(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store", count=7)
    prior = ClassPrior(ClassPriorSettings((1.0,)))
    served.settings = replace(served.settings, knn_weight=0.25, class_prior=prior)
    with asking(served) as client:
        (found,) = predicted(client, *some_inputs(1, seed=5).tolist()).json()[
            "predictions"
        ]
        assert client.get("/info").json()["class_prior"]
    for name, share in found["probabilities"].items():
        adapted = found["adapted_probabilities"][name]
        knn = found["knn_probabilities"][name]
        assert share == pytest.approx(0.25 * knn + 0.75 * adapted, abs=1e-6)
    # Of seven examples three are cats, and two each of the others.
    grown = {
        name: found["adapted_probabilities"][name] / share
        for name, share in found["global_probabilities"].items()
    }
    assert grown["cat"] > grown["dog"] == pytest.approx(grown["eel"], rel=1e-4)


def test_what_is_served_is_told(client: httpx.Client, served: SmallServed) -> None:
    info = client.get("/info").json()
    expected = {
        "client": "site-a",
        "model": served.model.fingerprint,
        "class_names": list(CLASSES),
        "knn_weight": 0.5,
        "num_neighbors": 3,
        "accuracy": asdict(SERVING.accuracy),
        "class_prior": False,
    }
    assert expected.items() <= info.items()
    assert info["store"]["num_by_class"] == dict.fromkeys(CLASSES, 3)


def test_what_was_done_is_counted(own: tuple[httpx.Client, SmallServed]) -> None:
    client, served = own
    answer = predicted(client, *some_inputs(2).tolist()).json()
    labels = [one["class_name"] for one in answer["predictions"]]
    client.post("/predict", json={})
    client.get("/nothing/here")
    lines = client.get("/metrics").text.splitlines()
    label, count = labels[0], float(labels.count(labels[0]))
    for line in (
        f'knnper_predictions_total{{class_name="{label}"}} {count}',
        'knnper_errors_total{path="/predict",status="422"} 1.0',
        'knnper_errors_total{path="other",status="404"} 1.0',
        'knnper_request_seconds_count{path="/predict"} 2.0',
        "knnper_store_examples 9.0",
        f'knnper_model_info{{model="{served.model.fingerprint}"}} 1.0',
    ):
        assert line in lines


def test_examples_are_added_and_deleted(own: tuple[httpx.Client, SmallServed]) -> None:
    client, served = own
    pixels = some_inputs(2, seed=9).tolist()
    sent = [
        {"input": pixels[0], "label": "eel", "name": "mine"},
        {"input": pixels[1], "label": 1},
    ]
    added = client.post("/examples", json={"examples": sent}).json()
    kept = [{"id": 10, "kept": True}, {"id": 11, "kept": True}]
    assert added == {"examples": kept, "evicted": [], "num_stored": 11}
    first = predicted(client, pixels[0]).json()["predictions"][0]["neighbors"][0]
    assert (first["id"], first["name"], first["class_name"]) == (10, "mine", "eel")
    deletion = client.request("DELETE", "/examples", json={"names": ["mine"]}).json()
    expected = {"deleted": [10], "erased": True, "message": None, "num_stored": 10}
    assert deletion == expected
    found = predicted(client, pixels[0]).json()
    assert 10 not in [one["id"] for one in found["predictions"][0]["neighbors"]]
    assert found["num_stored"] == len(served.store) == 10


@pytest.mark.parametrize(
    ("selection", "deleted"),
    [
        ({"ids": [2, 3, 99]}, [2, 3]),
        ({"labels": ["dog"]}, [2, 5, 8]),
        ({"labels": [1], "ids": [5, 6]}, [5]),
        ({"arrived_before": 1.0}, []),
        ({"arrived_from": 1.0, "names": ["train/00000"]}, [1]),
        ({"ids": []}, []),
    ],
)
def test_what_all_of_it_describes_is_deleted(
    own: tuple[httpx.Client, SmallServed],
    selection: dict[str, Any],
    deleted: list[int],
) -> None:
    answer = own[0].request("DELETE", "/examples", json=selection)
    assert answer.json()["deleted"] == deleted


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({}, "expected ids, names"),
        ({"labels": ["cow"]}, "eel"),
        ({"labels": [3]}, "labels.0"),
        ({"ids": [0]}, "ids.0"),
        ({"ids": ["1"]}, "ids.0"),
        ({"name": ["a"]}, "name"),
        ([], "body"),
    ],
)
def test_a_selection_that_is_none_is_refused(
    client: httpx.Client, selection: Any, words: str
) -> None:
    refused(client.request("DELETE", "/examples", json=selection), 422, words)


def test_a_name_that_is_taken_is_refused(client: httpx.Client) -> None:
    pixels = some_inputs(1)[0].tolist()
    taken = {"input": pixels, "label": 0, "name": "train/00001"}
    twice = {"input": pixels, "label": 0, "name": "new"}
    for examples, words in (([taken], "taken"), ([twice, twice], "twice")):
        refused(client.post("/examples", json={"examples": examples}), 409, words)


@pytest.mark.parametrize("label", ["cow", 3, -1, True, None, 1.5])
def test_a_label_that_is_none_is_refused(client: httpx.Client, label: Any) -> None:
    example = {"input": some_inputs(1)[0].tolist(), "label": label}
    refused(client.post("/examples", json={"examples": [example]}), 422, "label")


@pytest.mark.parametrize("policy", ["concatenate", "fifo"])
def test_a_full_store_says_so_or_makes_room(
    tmp_path: Path, policy: Literal["concatenate", "fifo"]
) -> None:
    settings = StoreSettings(capacity=9, policy=policy)
    example = {"input": some_inputs(1, seed=3)[0].tolist(), "label": 0}
    with asking(small_served(tmp_path / "store", settings=settings)) as client:
        answer = client.post("/examples", json={"examples": [example]})
    if policy == "concatenate":
        refused(answer, 507, "9")
        return
    kept = [{"id": 10, "kept": True}]
    assert answer.json() == {"examples": kept, "evicted": [1], "num_stored": 9}


def test_a_stored_input_is_shown_as_it_was_sent(client: httpx.Client) -> None:
    answer = client.get("/examples/4/image")
    assert answer.headers["content-type"] == "image/png"
    shown = np.asarray(Image.open(io.BytesIO(answer.content)))
    assert (shown == some_inputs(9)[3, :, :, 0].numpy()).all()
    refused(client.get("/examples/99/image"), 404, "99")
    refused(client.get("/examples/x/image"), 422, "example")


WORDS = "To be, or not"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Give a service of text: as it is written, or as the ids of its characters."""
    folder = tmp_path_factory.mktemp("served") / "store"
    with asking(small_served(folder, spec=TEXT)) as client:
        yield client


def test_text_and_its_ids_are_the_same_question(reader: httpx.Client) -> None:
    ids = encode(WORDS)[-6:]
    of_text = predicted(reader, {"text": WORDS})
    of_file = post(reader, npy(ids), NPY)
    assert of_text.status_code == 200, of_text.text
    assert of_text.json() == predicted(reader, ids.tolist()).json() == of_file.json()
    assert len(of_text.json()["predictions"][0]["probabilities"]) == 81
    # Curly quotation marks are plain ones.
    curly = predicted(reader, {"text": "\u201cIs\u2019t you\u201d"})
    assert curly.json() == predicted(reader, {"text": '"Is\'t you"'}).json()


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
def test_what_is_no_text_is_refused(
    reader: httpx.Client, given: Any, message: str
) -> None:
    refused(predicted(reader, given), 422, message)


def test_what_is_taught_as_text_is_a_neighbour(reader: httpx.Client) -> None:
    example = {"input": {"text": WORDS}, "label": "' '", "name": "hamlet"}
    added = reader.post("/examples", json={"examples": [example]})
    assert added.status_code == 200, added.text
    answer = predicted(reader, {"text": WORDS}).json()
    nearest = answer["predictions"][0]["neighbors"][0]
    assert (nearest["name"], nearest["class_name"]) == ("hamlet", "' '")


def test_that_text_is_taken_is_told(reader: httpx.Client) -> None:
    info = reader.get("/info").json()
    assert (info["input_type"], info["input_shape"]) == ("token", [6])
    assert (info["takes_pictures"], info["takes_text"]) == (False, True)
    document = reader.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    ids, text = schemas["PredictionRequest"]["properties"]["inputs"]["items"]["anyOf"]
    content = document["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert text == {"$ref": "#/components/schemas/Text"}
    assert schemas["Text"]["properties"]["text"]["minLength"] == 6
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 80}
    assert set(content) == {JSON, NPY, "multipart/form-data"}
