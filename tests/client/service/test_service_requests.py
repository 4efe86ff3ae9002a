"""What the service answers, what it refuses, and whom."""

import base64
import hashlib
import io
import json
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from PIL import Image

from knnper.client.service.access import SECURITY_HEADERS
from knnper.client.service.tokens import (
    SCOPES,
    Scope,
    Tokens,
    add_token,
    read_or_create_owner_token,
    revoke_token,
)
from knnper.data.characters import encode
from knnper.datastore.class_prior import ClassPrior, ClassPriorSettings
from knnper.datastore.policy import StoreSettings
from knnper.errors import RunError
from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    JSON,
    LIMITS,
    NPY,
    PNG,
    SERVING,
    TEXT,
    TOKEN,
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
from tests.knnper_data.wide_pictures import (
    COLOUR,
    COLOUR_AND_ALPHA,
    GREY_AND_ALPHA,
    png16,
)


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


def test_a_prediction_is_that_of_the_model_and_the_memory(
    client: httpx.Client, served: SmallServed
) -> None:
    inputs = some_inputs(1, seed=5)
    answer = predicted(client, *inputs.tolist()).json()
    expected = served.predict(inputs)
    prediction = answer["predictions"][0]
    assert list(prediction["probabilities"]) == list(CLASSES)
    assert (
        list(prediction["probabilities"].values()) == expected.probabilities[0].tolist()
    )
    assert prediction["label"] == int(expected.labels[0])
    assert prediction["class_name"] == CLASSES[prediction["label"]]
    ids = expected.vote.neighbors.ids[0].tolist()
    near = [(neighbor["id"], neighbor["name"]) for neighbor in prediction["neighbors"]]
    assert near == [(number, f"train/{number - 1:05d}") for number in ids]
    assert sum(
        neighbor["weight"] for neighbor in prediction["neighbors"]
    ) == pytest.approx(1)
    assert answer["model"] == served.model.fingerprint
    assert (answer["num_stored"], answer["knn_weight"]) == (9, 0.5)
    assert prediction["adapted_probabilities"] is None
    info = client.get("/info").json()
    assert (info["client"], info["class_names"]) == ("site-a", list(CLASSES))
    assert info["accuracy"] == asdict(SERVING.accuracy)


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
    as_files = [("image", ("a.png", png(image), "image/png")) for image in inputs]
    as_form = client.post("/predict", files=as_files).json()
    assert together == as_form == post(client, npy(inputs.numpy()), NPY).json()
    for prediction, alone in zip(together["predictions"], inputs, strict=True):
        answer = predicted(client, alone.tolist()).json()
        assert answer["predictions"][0]["label"] == prediction["label"]


def test_an_empty_memory_answers_as_the_global_model(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store", count=0)) as client:
        answer = predicted(client, *some_inputs(1).tolist()).json()
    prediction = answer["predictions"][0]
    assert (answer["knn_weight"], answer["num_stored"]) == (0, 0)
    assert (prediction["neighbors"], prediction["knn_probabilities"]) == ([], None)
    assert prediction["probabilities"] == prediction["global_probabilities"]


def test_features_are_sent_as_rows(tmp_path: Path) -> None:
    row = [0.5, -1, 2.0, 1e30]
    with asking(small_served(tmp_path / "store", spec=FEATURES)) as client:
        info = client.get("/info").json()
        answer = predicted(client, row)
        as_array = post(client, npy(np.array(row)), NPY)
        refused(predicted(client, [0, 0, 0, 1e39]), 422, "inputs.0.3")
        refused(post(client, b"", PNG), 415, "x-npy")
        refused(client.get("/examples/1/image"), 404, "no pictures")
    input_info = info["input_shape"], info["input_type"], info["takes_pictures"]
    assert input_info == ([4], "float32", False)
    assert answer.status_code == 200, answer.text
    assert as_array.json() == answer.json()


def test_features_are_sent_by_name(tmp_path: Path) -> None:
    names = ("age", "dose", "pulse", "size")
    store = tmp_path / "store"
    with asking(small_served(store, spec=FEATURES, feature_names=names)) as client:
        info = client.get("/info").json()
        in_order = predicted(client, [0.5, -1, 2.0, 1e3])
        by_name = predicted(client, {"pulse": 2.0, "size": 1e3, "age": 0.5, "dose": -1})
        for wrong, message in (
            ({"age": 0.5, "dose": -1, "pulse": 2}, "no value of feature 'size'"),
            (dict.fromkeys((*names, "puls"), 1), "unknown feature 'puls'"),
            ({"age": 0.5, "dose": -1, "pulse": 2, "size": 1e39}, "inputs.0.size"),
            ({"age": 0.5, "dose": -1, "pulse": 2, "size": "1"}, "inputs.0.size"),
            ([0, 0, 0, 1e39], "inputs.0.3"),
            ([0, 0, 0], "inputs.0: List should have at least 4"),
        ):
            refused(predicted(client, wrong), 422, message)
        example = {"input": dict(zip(names, range(4), strict=True)), "label": "cat"}
        added = client.post("/examples", json={"examples": [example]})
        document = client.get("/openapi.json").json()
    assert info["feature_names"] == list(names)
    assert by_name.status_code == 200, by_name.text
    assert by_name.json() == in_order.json()
    assert added.status_code == 200, added.text
    assert '"required": ["age", "dose", "pulse", "size"]' in json.dumps(document)


def test_a_label_of_other_white_space_is_the_same(
    own: tuple[httpx.Client, SmallServed],
) -> None:
    client, served = own
    inputs = some_inputs(2, seed=8).tolist()
    for given, label in zip(inputs, ("dog\u00a0", " dog"), strict=True):
        example = {"input": given, "label": label}
        added = client.post("/examples", json={"examples": [example]})
        assert added.status_code == 200, added.text
    assert served.store.contents().labels[-2:].tolist() == [1, 1]


def test_an_answer_names_what_is_mixed(tmp_path: Path) -> None:
    served, inputs = small_served(tmp_path / "store", count=7), some_inputs(1, seed=5)
    prior = ClassPrior(ClassPriorSettings((1.0,)))
    served.settings = replace(served.settings, knn_weight=0.25, class_prior=prior)
    with asking(served) as client:
        (prediction,) = predicted(client, *inputs.tolist()).json()["predictions"]
        assert client.get("/info").json()["class_prior"]
        expected = served.predict(inputs)
    assert expected.adapted_probabilities is not None
    for name, shares in (
        ("probabilities", expected.probabilities),
        ("global_probabilities", expected.global_probabilities),
        ("adapted_probabilities", expected.adapted_probabilities),
    ):
        assert list(prediction[name].values()) == shares[0].tolist()


def test_what_was_done_is_counted(own: tuple[httpx.Client, SmallServed]) -> None:
    client, served = own
    answer = predicted(client, *some_inputs(2).tolist()).json()
    labels = [prediction["class_name"] for prediction in answer["predictions"]]
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
    predicted_again = predicted(client, pixels[0]).json()
    assert 10 not in [
        neighbor["id"] for neighbor in predicted_again["predictions"][0]["neighbors"]
    ]
    assert predicted_again["num_stored"] == len(served.store) == 10


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
    own: tuple[httpx.Client, SmallServed], selection: dict[str, Any], deleted: list[int]
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
    example = {"input": pixels, "label": 0, "name": "train/00001"}
    twice = {"input": pixels, "label": 0, "name": "new"}
    for examples, words in (([example], "taken"), ([twice, twice], "twice")):
        refused(client.post("/examples", json={"examples": examples}), 409, words)


@pytest.mark.parametrize("label", ["cow", 3, -1, True, None, 1.5])
def test_a_label_that_is_none_is_refused(client: httpx.Client, label: Any) -> None:
    example = {"input": some_inputs(1)[0].tolist(), "label": label}
    refused(client.post("/examples", json={"examples": [example]}), 422, "label")


@pytest.mark.parametrize("policy", ["concatenate", "fifo"])
def test_full_store_refuses_or_evicts(
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
    info = reader.get("/info").json()
    assert (info["input_type"], info["input_shape"]) == ("token", [6])
    assert (info["takes_pictures"], info["takes_text"]) == (False, True)
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


def picture(mode: str, size: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (size, size)).save(file, kind)
    return file.getvalue()


OTHER_FORMATS = ("GIF", "TIFF", "WEBP", "BMP")
FORM = "multipart/form-data; boundary=x"
DIGIT = np.zeros((8, 8, 1), np.uint8)

NO_INPUTS: list[tuple[str, bytes, int, str]] = [
    (JSON, b"{", 400, "JSON"),
    (JSON, b'{"inputs": [NaN]}', 422, "inputs.0"),
    (JSON, b"[" * 900, 400, "JSON"),
    (JSON, b"{}", 422, "inputs"),
    (JSON, b'{"inputs": []}', 422, "at least 1"),
    (JSON, b'{"inputs": [1]}', 422, "inputs.0"),
    (JSON, b'{"inputs": [{"image": "%"}]}', 422, "base64"),
    (JSON, b'{"inputs": [{"image": "aGFsbG8="}]}', 422, "PNG or JPEG"),
    (JSON, b'{"inputs": [{"image": "", "more": 1}]}', 422, "inputs.0.more"),
    (JSON, b'{"inputs": [1, 1, 1, 1, 1]}', 422, "inputs"),
    (JSON, b'{"inputs": [], "more": 1}', 422, "more"),
    (JSON, b'{"inputs": [' + b"9" * 15_000 + b"]}", 400, "JSON"),
    # Too many values are refused before they are parsed.
    (JSON, b'{"inputs": [' + 1000 * b"[]," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b"{}," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b"0," + b"0]}", 413, "values"),
    (JSON, b'{"inputs": [' + 1000 * b'"",' + b"0]}", 413, "values"),
    (NPY, b"hello", 400, "numpy.save"),
    (NPY, b"\x93NUMPY\x01\x00\x02\x00(\n", 400, "numpy.save"),
    (NPY, b"\x93NUMPY\x02\x00\x10\x00\x00\x00" + 16 * b"(", 400, "numpy.save"),
    (NPY, npy(DIGIT)[:-1], 400, "cut short"),
    (NPY, npy(DIGIT) + b"x", 400, "more follows"),
    (NPY, npy(DIGIT.astype(np.int64)), 422, "uint8"),
    (NPY, npy(np.zeros((8, 9, 1), np.uint8)), 422, "(8, 8, 1)"),
    (NPY, npy(np.array([{"a": 1}], object)), 422, "object"),
    (NPY, npy(np.zeros((5, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    (NPY, npy(np.zeros((0, 8, 8, 1), np.uint8)), 422, "1 to 4"),
    *((PNG, png(some_inputs(1)[0])[:cut], 422, "PNG") for cut in (8, 40, 60)),
    *((PNG, picture("RGB", 20, kind), 422, "PNG") for kind in OTHER_FORMATS),
    (PNG, picture("1", 9000), 413, "9000x9000"),
    # Pixels of 16 bits are not cut off.
    (PNG, picture("I;16", 8), 422, "expected 8-bit; scale them to 0-255"),
    *(
        (PNG, png16(colour), 422, "found 16-bit pixels")
        for colour in (COLOUR, GREY_AND_ALPHA, COLOUR_AND_ALPHA)
    ),
    *((kind, b"{}", 415, "application/json") for kind in ("a/b/c", "", "image/gif")),
    *((kind, b"{}", 415, "application/json") for kind in ("text/plain", "json")),
    ("multipart/form-data", b"", 400, "boundary"),
    (FORM, b"", 400, "parts"),
    (FORM, b"--x\r\nno headers\r\n--x--", 400, "blank line"),
    (FORM, b"--x\r\n\r\n--x", 400, "parts"),
    (FORM, b"--x\r\nA: " + 4000 * b"(" + b"\r\n\r\n1\r\n--x--", 400, '"name"'),
    (JSON, b" " * 20_001, 413, "more than 20000 bytes"),
]


@pytest.mark.parametrize(("kind", "body", "status", "words"), NO_INPUTS)
def test_what_is_no_input_is_refused(
    client: httpx.Client, kind: str, body: bytes, status: int, words: str
) -> None:
    assert kind != PNG or len(body) < LIMITS.max_request_bytes
    refused(post(client, body, kind), status, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((256, "255"), (-1, "0"), (True, "bool"), ("1", "str"), (None, "NoneType")),
        *((10**400, "finite"), (1.5, "1.5"), (2.6e-42, "2.6e-42")),
        (254.999999999, "255"),
    ],
)
def test_a_pixel_that_is_none_is_refused(
    client: httpx.Client, value: Any, words: str
) -> None:
    pixels = some_inputs(1)[0].tolist()
    pixels[3][4] = [value]
    answer = client.post("/predict", json={"inputs": [pixels]})
    refused(answer, 422, words)
    # Whether numbers are whole is looked at in all of them at once.
    place = "whole" if isinstance(value, float) else "inputs.0.3.4.0"
    refused(answer, 422, place)


def test_a_header_that_claims_any_size_is_refused(client: httpx.Client) -> None:
    content = bytearray(png(some_inputs(1)[0]))
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    answer = post(client, bytes(content), PNG)
    refused(answer, 413, "too large")


def test_all_images_of_a_request_are_counted(client: httpx.Client) -> None:
    parts = [("image", ("a.png", picture("1", 20), "image/png"))] * 3
    assert client.post("/predict", files=parts[:2]).status_code == 200
    refused(client.post("/predict", files=parts), 413, "1000")


def test_jpeg_with_many_scans_is_refused(client: httpx.Client) -> None:
    """Each of its scans has some bytes, and goes over all pixels."""
    file = io.BytesIO()
    Image.new("L", (24, 24), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    assert post(client, content, "image/jpeg").status_code == 200
    scan = content[content.rindex(b"\xff\xda") : -2]
    many = content[:-2] + 100 * scan + content[-2:]
    refused(post(client, many, "image/jpeg"), 413, "times")


def test_jpeg_with_exif_in_many_pieces_is_refused(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8), 128).save(file, "JPEG")
    content, segment = file.getvalue(), b"\xff\xe1\x00\x09Exif\0\0x"
    few = content[:2] + 16 * segment + content[2:]
    assert post(client, few, "image/jpeg").status_code == 200
    many = content[:2] + 17 * segment + content[2:]
    refused(post(client, many, "image/jpeg"), 422, "Exif data in more than 16 pieces")


@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="image"; filename="a; name=b.png"',
        'form-data; filename="a; name=b.png"; name="image"',
        "FORM-DATA;NAME = image",
    ],
)
def test_field_of_form_is_found_however_it_is_written(
    client: httpx.Client, disposition: str
) -> None:
    head = f"--x\r\nContent-Disposition: {disposition}\r\nContent-Type: image/png\r\n"
    body = head.encode() + b"\r\n" + png(some_inputs(1)[0]) + b"\r\n--x--"
    for kind in (FORM, 'multipart/form-data; charset=utf-8; Boundary="x"'):
        assert post(client, body, kind).status_code == 200


def test_a_form_with_other_fields_is_refused(client: httpx.Client) -> None:
    files = {"file": ("a.png", png(some_inputs(1)[0]), "image/png")}
    refused(client.post("/predict", files=files), 422, "'file'")


def test_form_without_its_end_is_refused(client: httpx.Client) -> None:
    head = '--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    refused(post(client, f"{head}1\r\n{head}2".encode(), FORM), 400, "cut short")


def test_a_body_without_a_length_that_is_too_large_is_refused(
    client: httpx.Client,
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(21):
            yield b" " * 1000

    refused(post(client, chunks(), JSON), 413, "more than 20000 bytes")


SECRET = (
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/examples/1/image"),
    ("GET", "/no/such/path"),
    ("POST", "/predict"),
    ("POST", "/examples"),
    ("DELETE", "/examples"),
)

INCLUDED = {
    *(("predict", "probabilities"), ("predict", "neighbors")),
    ("probabilities", "neighbors"),
}

Scoped = tuple[httpx.Client, dict[Scope, str]]


def test_request_without_the_token_is_refused(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store")
    with asking(served) as client:
        address = str(client.base_url)
        for method, path in SECRET:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
                answer = httpx.request(method, f"{address}{path}", headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"] == "unauthorized"
                assert answer.headers["www-authenticate"].startswith("Bearer")
        for path in ("/", "/page.css", "/page.js", "/health", "/ready"):
            assert httpx.get(f"{address}{path}").status_code == 200, path


def test_a_header_must_bear_the_token() -> None:
    tokens = Tokens(Path("no such folder"), "s3cret")
    assert all(map(tokens.caller, ("Bearer s3cret", "bearer  s3cret ")))
    near = ("Bearer s3cre", "Bearer s3crets", "Basic s3cret", "Bearer sécret")
    assert not any(map(tokens.caller, (*near, "s3cret", "Bearer", "")))


NEEDED: tuple[tuple[Scope, str, str], ...] = (
    ("predict", "POST", "/predict"),
    ("read", "GET", "/examples/1/image"),
    ("add", "POST", "/examples"),
    ("delete", "DELETE", "/examples"),
    ("metrics", "GET", "/metrics"),
)


@pytest.fixture(scope="module")
def scoped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scoped]:
    """Give a service, and a token of each scope."""
    folder = tmp_path_factory.mktemp("scoped")
    tokens = {scope: add_token(folder, scope, [scope]) for scope in SCOPES}
    with asking(small_served(folder / "store"), state=folder) as client:
        yield client, tokens


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(("needed", "method", "path"), NEEDED)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_token_may_what_its_scopes_say_and_no_more(
    scoped: Scoped, scope: Scope, needed: Scope, method: str, path: str
) -> None:
    client, tokens = scoped
    answer = client.request(
        method, path, json={"inputs": []}, headers=bearing(tokens[scope])
    )
    if scope == needed or (needed, scope) in INCLUDED:
        # A prediction or change of nothing is refused for itself.
        assert answer.status_code in (200, 422)
        return
    assert answer.status_code == 403
    assert answer.json()["error"] == "forbidden"
    assert f"--scope {needed}" in answer.json()["message"]
    assert f'scope="{needed}"' in answer.headers["www-authenticate"]


LEAST = "label class_name"

ALL = (
    f"{LEAST} probabilities global_probabilities adapted_probabilities "
    "knn_probabilities neighbors"
)


@pytest.mark.parametrize(
    ("scope", "of_one", "of_all"),
    [
        ("predict", LEAST, "predictions model"),
        ("probabilities", f"{LEAST} probabilities", "predictions model"),
        ("neighbors", ALL, "predictions model knn_weight num_stored"),
    ],
)
def test_prediction_shows_what_the_scope_allows(
    scoped: Scoped, scope: Scope, of_one: str, of_all: str
) -> None:
    client, tokens = scoped
    body, headers = {"inputs": some_inputs(1).tolist()}, bearing(tokens[scope])
    answer = client.post("/predict", json=body, headers=headers).json()
    assert set(answer) == set(of_all.split())
    assert set(answer["predictions"][0]) == set(of_one.split())
    info = client.get("/info", headers=headers).json()
    assert (info["token"], "store" in info) == (scope, False)
    assert ("knn_weight" in info) == ("accuracy" in info) == (scope == "neighbors")
    scopes = set(info["scopes"])
    assert scopes == {scope} | {part for part, needed in INCLUDED if needed == scope}
    info = client.get("/info", headers=bearing(tokens["read"])).json()
    assert info["store"]["num_by_class"] == dict.fromkeys(CLASSES, 3)
    assert "knn_weight" not in info


def test_a_token_is_not_kept_as_it_is_and_its_name_is_unique(tmp_path: Path) -> None:
    token = add_token(tmp_path, "tablet", ["predict"])
    assert len(token) >= 32
    kept = (tmp_path / "tokens.json").read_text()
    assert token not in kept
    assert hashlib.sha256(token.encode()).hexdigest() in kept
    for name in ("tablet", "owner", "a/b", ""):
        with pytest.raises(RunError):
            add_token(tmp_path, name, ["predict"])
    with pytest.raises(RunError, match="tablet"):
        revoke_token(tmp_path, "phone")


def test_tokens_that_cannot_be_read_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, token = Tokens(tmp_path, TOKEN), add_token(tmp_path, "tablet", ["predict"])
    assert tokens.caller(f"Bearer {token}") is not None
    (tmp_path / "tokens.json").write_text('[{"name": "tablet", "scopes": ["root"]}]')
    assert tokens.caller(f"Bearer {token}") is None
    owner = tokens.caller(f"Bearer {TOKEN}")
    assert owner is not None
    assert owner.scopes == set(SCOPES)
    assert caplog.text.count("tokens.json") == 1
    with pytest.raises(RunError, match=r"tokens\.json"):
        Tokens(tmp_path, TOKEN)


def test_without_a_token_other_machines_and_their_pages_are_refused(
    tmp_path: Path,
) -> None:
    with asking(small_served(tmp_path / "store"), token=None) as client:
        port = client.base_url.port
        body = {"inputs": some_inputs(1).tolist()}
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{port}"}, 200),
            ({"Origin": f"http://127.0.0.1:{port}"}, 200),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": f"evil.example:{port}"}, 403),
        ):
            answer = client.post("/predict", json=body, headers=headers)
            assert answer.status_code == status, headers


def test_browser_may_load_nothing_else(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        assert client.put("/examples").headers["allow"] == "DELETE, POST"
        assert client.post("/openapi.json").headers["allow"] == "GET"
        texts = [client.get(path).text for path in ("/", "/page.css", "/page.js")]
        answers = [
            client.get("/"),
            client.get("/info"),
            client.get("/no/such/path"),
            client.put("/predict"),
            httpx.get(f"{client.base_url}/info"),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 405, 401]
    for answer in answers:
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value
        assert "server" not in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers)
    for text in texts:
        assert not any(
            scheme in text.replace("// ", "") for scheme in ("http:", "https:", "//")
        )


def test_the_owners_token_is_made_once_and_is_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_create_owner_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_owner_token(path) == token
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    path.write_text("short")
    for mode, words in ((0o600, "16"), (0o640, "0640")):
        path.chmod(mode)
        with pytest.raises(RunError, match=words):
            read_or_create_owner_token(path)
    with pytest.raises(RunError, match="cannot be used"):
        read_or_create_owner_token(tmp_path / "no folder" / "token")
