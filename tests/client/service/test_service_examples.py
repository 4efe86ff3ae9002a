"""Examples that are added to the memory, deleted, and shown."""

import io
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from PIL import Image

from knnper.datastore.policy import StoreSettings
from tests.client.service.small_service import (
    SmallServed,
    asking,
    small_served,
    some_inputs,
)
from tests.client.service.some_requests import refused


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
    refused(client.post("/examples", json={"examples": [taken]}), 409, "taken")
    twice = {"input": pixels, "label": 0, "name": "new"}
    refused(client.post("/examples", json={"examples": [twice, twice]}), 409, "twice")


@pytest.mark.parametrize("label", ["cow", 3, -1, True, None, 1.5])
def test_a_label_that_is_none_is_refused(client: httpx.Client, label: Any) -> None:
    example = {"input": some_inputs(1)[0].tolist(), "label": label}
    answer = client.post("/examples", json={"examples": [example]})
    refused(answer, 422, "label")


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
