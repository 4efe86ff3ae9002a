"""What is sent in all the ways it can be, and what is refused."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from client.service.limits import Limits
from datastore.settings import StoreSettings
from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    SmallServed,
    asking,
    small_served,
    some_inputs,
)

LIMITS = Limits(max_inputs=4, max_request_bytes=20_000, max_pixels=1000, poll_s=0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SmallServed:
    return small_served(tmp_path_factory.mktemp("served") / "store")


@pytest.fixture(scope="module")
def client(served: SmallServed) -> Iterator[httpx.Client]:
    with asking(served, limits=LIMITS) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[httpx.Client, SmallServed]]:
    """Give a service that the test may change."""
    served = small_served(tmp_path / "store")
    with asking(served) as client:
        yield client, served


def png(pixels: torch.Tensor, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()[:, :, 0]).save(file, kind)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    document = answer.json()
    assert set(document) == {"error", "message"}
    assert words in document["message"]


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
    ids = expected.neighbors.ids[0].tolist()
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
    as_array = client.post(
        "/predict",
        content=npy(inputs.numpy()),
        headers={"content-type": "application/x-npy"},
    ).json()
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
    answer = client.post(
        "/predict", content=file.getvalue(), headers={"content-type": "image/png"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b'{"inputs": [NaN]}', 400, "JSON"),
        (b"[" * 100_00, 400, "JSON"),
        (b"{}", 422, "inputs"),
        (b'{"inputs": []}', 422, "1 to 4"),
        (b'{"inputs": [1]}', 422, "inputs[0]"),
        (b'{"inputs": [{"image": "%"}]}', 422, "base64"),
        (b'{"inputs": [{"image": "aGFsbG8="}]}', 422, "PNG or JPEG"),
        (b'{"inputs": [{"image": "", "more": 1}]}', 422, "inputs[0]"),
        (b'{"inputs": [1, 1, 1, 1, 1]}', 422, "1 to 4"),
        (b'{"inputs": [], "more": 1}', 422, "nothing else"),
    ],
)
def test_json_that_is_no_input_is_refused(
    client: httpx.Client, body: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/json"}
    refused(client.post("/predict", content=body, headers=headers), status, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (256, "from 0 to 255"),
        (-1, "from 0 to 255"),
        (1.5, "whole numbers"),
        (True, "expected numbers, found bool"),
        ("1", "expected numbers, found str"),
        (None, "expected numbers, found NoneType"),
        (10**400, "from 0 to 255"),
    ],
)
def test_a_pixel_that_is_none_is_refused(
    client: httpx.Client, value: Any, words: str
) -> None:
    pixels = some_inputs(1)[0].tolist()
    pixels[3][4] = [value]
    refused(client.post("/predict", json={"inputs": [pixels]}), 422, words)


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"hello", 400, "numpy.save"),
        (npy(np.zeros((8, 8, 1), np.uint8))[:-1], 400, "cut short"),
        (npy(np.zeros((8, 8, 1), np.uint8)) + b"x", 400, "more follows"),
        (npy(np.zeros((8, 8, 1), np.int64)), 422, "uint8"),
        (npy(np.zeros((8, 9, 1), np.uint8)), 422, "(8, 8, 1)"),
        (npy(np.array([{"a": 1}], object)), 422, "numbers"),
        (npy(np.zeros((5, 8, 8, 1), np.uint8)), 422, "1 to 4"),
        (npy(np.zeros((0, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    ],
)
def test_an_array_file_that_is_no_input_is_refused(
    client: httpx.Client, content: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/x-npy"}
    refused(client.post("/predict", content=content, headers=headers), status, words)


def test_an_array_in_columns_first_order_is_read_as_it_is_meant(
    client: httpx.Client,
) -> None:
    pixels = some_inputs(1, seed=8)[0].numpy()
    headers = {"content-type": "application/x-npy"}
    answers = [
        client.post("/predict", content=npy(array), headers=headers).json()
        for array in (pixels, np.asfortranarray(pixels))
    ]
    assert answers[0] == answers[1]


def test_an_image_that_is_huge_when_decoded_is_refused(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    assert len(file.getvalue()) < LIMITS.max_request_bytes
    headers = {"content-type": "image/png"}
    answer = client.post("/predict", content=file.getvalue(), headers=headers)
    refused(answer, 422, "9000x9000 pixels, expected at most 1000")


@pytest.mark.parametrize("cut", [8, 40, 60])
def test_a_damaged_image_is_refused(client: httpx.Client, cut: int) -> None:
    headers = {"content-type": "image/png"}
    content = png(some_inputs(1)[0])[:cut]
    refused(client.post("/predict", content=content, headers=headers), 422, "PNG")


def test_formats_other_than_png_and_jpeg_are_not_decoded(client: httpx.Client) -> None:
    headers = {"content-type": "image/png"}
    content = png(some_inputs(1)[0], "GIF")
    refused(client.post("/predict", content=content, headers=headers), 422, "PNG")


@pytest.mark.parametrize("kind", ["text/plain", "image/gif", "", "a/b/c", "json"])
def test_other_content_types_are_refused(client: httpx.Client, kind: str) -> None:
    answer = client.post("/predict", content=b"{}", headers={"content-type": kind})
    refused(answer, 415, "application/json")


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "multipart/form-data", "boundary"),
        (b"", "multipart/form-data; boundary=x", "parts"),
        (
            b"--x\r\nno headers\r\n--x--",
            "multipart/form-data; boundary=x",
            "blank line",
        ),
        (b"--x\r\n\r\n--x", "multipart/form-data; boundary=x", "parts"),
    ],
)
def test_a_malformed_form_is_refused(
    client: httpx.Client, content: bytes, kind: str, words: str
) -> None:
    answer = client.post("/predict", content=content, headers={"content-type": kind})
    refused(answer, 400, words)


def test_a_form_with_other_fields_is_refused(client: httpx.Client) -> None:
    files = {"file": ("a.png", png(some_inputs(1)[0]), "image/png")}
    refused(client.post("/predict", files=files), 422, "'file'")


def test_a_body_that_is_too_large_is_refused(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/predict", content=b" " * 20_001, headers=headers)
    refused(answer, 413, "more than 20000 bytes")

    def chunks() -> Iterator[bytes]:  # sent without a content length
        for _ in range(21):
            yield b" " * 1000

    answer = client.post("/predict", content=chunks(), headers=headers)
    refused(answer, 413, "more than 20000 bytes")


def test_examples_are_added_and_deleted(
    own: tuple[httpx.Client, SmallServed],
) -> None:
    client, served = own
    pixels = some_inputs(2, seed=9)
    sent = [
        {"input": pixels[0].tolist(), "label": "eel", "name": "mine"},
        {"input": pixels[1].tolist(), "label": 1},
    ]
    added = client.post("/examples", json={"examples": sent}).json()
    kept = [{"id": 10, "kept": True}, {"id": 11, "kept": True}]
    assert added == {"examples": kept, "evicted": [], "num_stored": 11}
    found = client.post("/predict", json={"inputs": [pixels[0].tolist()]}).json()
    first = found["predictions"][0]["neighbors"][0]
    assert (first["id"], first["name"], first["class_name"]) == (10, "mine", "eel")
    deletion = client.request("DELETE", "/examples", json={"names": ["mine"]}).json()
    expected = {"deleted": [10], "erased": True, "message": None, "num_stored": 10}
    assert deletion == expected
    found = client.post("/predict", json={"inputs": [pixels[0].tolist()]}).json()
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
        ({"labels": ["cow"]}, "cat, dog, eel"),
        ({"labels": [3]}, "from 0 to 2"),
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
    refused(client.post("/examples", json={"examples": [taken]}), 409, "taken")
    twice = {"input": pixels, "label": 0, "name": "new"}
    refused(client.post("/examples", json={"examples": [twice, twice]}), 409, "twice")


@pytest.mark.parametrize("label", ["cow", 3, -1, True, None, 1.5])
def test_a_label_that_is_none_is_refused(client: httpx.Client, label: Any) -> None:
    example = {"input": some_inputs(1)[0].tolist(), "label": label}
    answer = client.post("/examples", json={"examples": [example]})
    refused(answer, 422, "label")


def test_a_store_that_is_full_says_so(tmp_path: Path) -> None:
    settings = StoreSettings(capacity=9)
    with asking(small_served(tmp_path / "store", settings=settings)) as client:
        example = {"input": some_inputs(1, seed=3)[0].tolist(), "label": 0}
        refused(client.post("/examples", json={"examples": [example]}), 507, "9")


def test_a_policy_makes_room_and_says_for_whom(tmp_path: Path) -> None:
    settings = StoreSettings(capacity=9, policy="fifo")
    with asking(small_served(tmp_path / "store", settings=settings)) as client:
        example = {"input": some_inputs(1, seed=3)[0].tolist(), "label": 0}
        answer = client.post("/examples", json={"examples": [example]}).json()
    kept = [{"id": 10, "kept": True}]
    assert answer == {"examples": kept, "evicted": [1], "num_stored": 9}


def test_a_stored_input_is_shown_as_it_was_sent(client: httpx.Client) -> None:
    answer = client.get("/examples/4/image")
    assert answer.headers["content-type"] == "image/png"
    shown = np.asarray(Image.open(io.BytesIO(answer.content)))
    assert (shown == some_inputs(9)[3, :, :, 0].numpy()).all()
    refused(client.get("/examples/99/image"), 404, "99")
    refused(client.get("/examples/x/image"), 422, "example")


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
        as_array = client.post(
            "/predict",
            content=npy(np.array(row)),
            headers={"content-type": "application/x-npy"},
        )
        too_large = client.post("/predict", json={"inputs": [[0, 0, 0, 1e39]]})
        picture = client.post(
            "/predict", content=b"", headers={"content-type": "image/png"}
        )
        refused(client.get("/examples/1/image"), 404, "no pictures")
    assert info["input_shape"] == [4]
    assert (info["input_type"], info["takes_pictures"]) == ("float32", False)
    assert answer.status_code == 200, answer.text
    assert as_array.json() == answer.json()
    refused(too_large, 422, "from -3.4")
    refused(picture, 415, "x-npy")


def test_what_is_served_is_told(client: httpx.Client, served: SmallServed) -> None:
    info = client.get("/info").json()
    assert info["client"] == "site-a"
    assert info["model"] == served.model.fingerprint
    assert info["class_names"] == list(CLASSES)
    assert (info["knn_weight"], info["num_neighbors"]) == (0.5, 3)
    assert info["accuracy"] == {
        "global_model": 0.6,
        "knn": 0.7,
        "mixed": 0.8,
        "num_examples": 20,
        "measured_on": "validation",
    }
    assert info["store"]["num_by_class"] == dict.fromkeys(CLASSES, 3)
    assert json.dumps(info)


def test_what_was_done_is_counted(own: tuple[httpx.Client, SmallServed]) -> None:
    client, served = own
    inputs = some_inputs(2).tolist()
    labels = [
        one["class_name"]
        for one in client.post("/predict", json={"inputs": inputs}).json()[
            "predictions"
        ]
    ]
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
