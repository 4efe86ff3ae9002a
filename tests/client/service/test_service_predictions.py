"""Predictions, in all the ways they are asked for, and what is told of the service."""

import base64
import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from knnper.datastore.prediction import ClassPrior, ClassPriorSettings
from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    SERVING,
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
    assert found["adapted_probabilities"] is None


def test_all_ways_to_send_an_input_are_answered_alike(client: httpx.Client) -> None:
    pixels = some_inputs(1, seed=6)[0]
    file = png(pixels)
    bodies: list[dict[str, Any]] = [
        {"json": {"inputs": [pixels.tolist()]}},
        {"json": {"inputs": [{"image": base64.b64encode(file).decode()}]}},
        {"content": file, "headers": {"content-type": PNG}},
        {"content": npy(pixels.numpy()), "headers": {"content-type": NPY}},
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


def test_other_sizes_kinds_and_orders_are_converted(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (30, 20), (200, 10, 10, 255)).save(file, "PNG")
    assert post(client, file.getvalue(), PNG).status_code == 200
    rows = some_inputs(1, seed=8)[0].numpy()
    columns = post(client, npy(np.asfortranarray(rows)), NPY).json()
    assert columns == post(client, npy(rows), NPY).json()


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


QUESTION = {"inputs": some_inputs(1, seed=5).tolist()}


def test_an_answer_names_what_is_mixed(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store", count=7)
    prior = ClassPrior(ClassPriorSettings((1.0,)))
    served.settings = replace(served.settings, knn_weight=0.25, class_prior=prior)
    with asking(served) as client:
        (found,) = client.post("/predict", json=QUESTION).json()["predictions"]
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
    assert info["client"] == "site-a"
    assert info["model"] == served.model.fingerprint
    assert info["class_names"] == list(CLASSES)
    assert (info["knn_weight"], info["num_neighbors"]) == (0.5, 3)
    assert info["accuracy"] == asdict(SERVING.accuracy)
    assert info["store"]["num_by_class"] == dict.fromkeys(CLASSES, 3)
    assert not info["class_prior"]


def test_what_was_done_is_counted(own: tuple[httpx.Client, SmallServed]) -> None:
    client, served = own
    inputs = some_inputs(2).tolist()
    answer = client.post("/predict", json={"inputs": inputs}).json()
    labels = [one["class_name"] for one in answer["predictions"]]
    client.post("/predict", json={})
    client.get("/nothing/here")
    lines = client.get("/metrics").text.splitlines()
    label = labels[0]
    count = float(labels.count(label))
    assert f'knnper_predictions_total{{class_name="{label}"}} {count}' in lines
    assert 'knnper_errors_total{path="/predict",status="422"} 1.0' in lines
    assert 'knnper_errors_total{path="other",status="404"} 1.0' in lines
    assert 'knnper_request_seconds_count{path="/predict"} 2.0' in lines
    assert "knnper_store_examples 9.0" in lines
    assert f'knnper_model_info{{model="{served.model.fingerprint}"}} 1.0' in lines
