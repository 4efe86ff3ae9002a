"""What is sent to be predicted, in all the ways it can be."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    SmallServed,
    asking,
    small_served,
    some_inputs,
)
from tests.client.service.some_requests import NPY, PNG, npy, png, post, refused


def test_a_prediction_is_that_of_the_model_and_the_memory(
    client: httpx.Client, served: SmallServed
) -> None:
    inputs = some_inputs(1, seed=5)
    answer = client.post("/predict", json={"inputs": inputs.tolist()}).json()
    expected = served.predict(inputs)
    found = answer["predictions"][0]
    assert list(found["probabilities"]) == list(CLASSES)
    assert list(found["probabilities"].values()) == expected.probabilities[0].tolist()
    assert found["label"] == int(expected.labels[0])
    assert found["class_name"] == CLASSES[found["label"]]
    ids = expected.vote.neighbors.ids[0].tolist()
    assert [one["id"] for one in found["neighbors"]] == ids
    names = [f"train/{number - 1:05d}" for number in ids]
    assert [one["name"] for one in found["neighbors"]] == names
    assert sum(one["weight"] for one in found["neighbors"]) == pytest.approx(1)
    assert answer["model"] == served.model.fingerprint
    assert (answer["num_stored"], answer["knn_weight"]) == (9, 0.5)


def test_all_ways_to_send_an_input_are_answered_alike(client: httpx.Client) -> None:
    pixels = some_inputs(1, seed=6)[0]
    file = png(pixels)
    bodies: list[dict[str, Any]] = [
        {"json": {"inputs": [pixels.tolist()]}},
        {"json": {"inputs": [{"image": base64.b64encode(file).decode()}]}},
        {"content": file, "headers": {"content-type": "image/png"}},
        {
            "content": npy(pixels.numpy()),
            "headers": {"content-type": "application/x-npy"},
        },
        {"files": {"image": ("a.png", file, "image/png")}},
    ]
    answers = [client.post("/predict", **body).json() for body in bodies]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["predictions"]) == 1


def test_many_inputs_are_answered_in_order(client: httpx.Client) -> None:
    inputs = some_inputs(3, seed=7)
    together = client.post("/predict", json={"inputs": inputs.tolist()}).json()
    as_files = [("image", ("a.png", png(one), "image/png")) for one in inputs]
    as_form = client.post("/predict", files=as_files).json()
    as_array = post(client, npy(inputs.numpy()), NPY).json()
    alone = [
        client.post("/predict", json={"inputs": [one.tolist()]}).json()
        for one in inputs
    ]
    assert together == as_form == as_array
    labels = [one["label"] for one in together["predictions"]]
    assert labels == [one["predictions"][0]["label"] for one in alone]


def test_an_image_of_another_size_and_kind_is_converted(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (30, 20), (200, 10, 10, 255)).save(file, "PNG")
    answer = post(client, file.getvalue(), PNG)
    assert answer.status_code == 200


def test_an_array_in_columns_first_order_is_read_as_it_is_meant(
    client: httpx.Client,
) -> None:
    pixels = some_inputs(1, seed=8)[0].numpy()
    answers = [
        post(client, npy(array), NPY).json()
        for array in (pixels, np.asfortranarray(pixels))
    ]
    assert answers[0] == answers[1]


def test_an_empty_memory_answers_as_the_global_model(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store", count=0)) as client:
        inputs = some_inputs(1).tolist()
        answer = client.post("/predict", json={"inputs": inputs}).json()
    found = answer["predictions"][0]
    assert (answer["knn_weight"], answer["num_stored"]) == (0, 0)
    assert (found["neighbors"], found["knn_probabilities"]) == ([], None)
    assert found["probabilities"] == found["global_probabilities"]


def test_features_are_sent_as_rows(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store", spec=FEATURES)
    row = [0.5, -1, 2.0, 1e30]
    with asking(served) as client:
        info = client.get("/info").json()
        answer = client.post("/predict", json={"inputs": [row]})
        as_array = post(client, npy(np.array(row)), NPY)
        too_large = client.post("/predict", json={"inputs": [[0, 0, 0, 1e39]]})
        picture = post(client, b"", PNG)
        refused(client.get("/examples/1/image"), 404, "no pictures")
    assert info["input_shape"] == [4]
    assert (info["input_type"], info["takes_pictures"]) == ("float32", False)
    assert answer.status_code == 200, answer.text
    assert as_array.json() == answer.json()
    refused(too_large, 422, "inputs.0.3")
    refused(picture, 415, "x-npy")
