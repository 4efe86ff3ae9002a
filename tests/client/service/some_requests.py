"""Bodies of requests, and answers that refuse one."""

import io
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from knnper.client.service.inputs import Limits

JSON, NPY, PNG = "application/json", "application/x-npy", "image/png"
LIMITS = Limits(
    max_inputs=4,
    max_request_bytes=20_000,
    max_pixels=1000,
    max_json_values=1000,
    poll_s=0.05,
)


def png(pixels: torch.Tensor, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()[:, :, 0]).save(file, kind)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def post(client: httpx.Client, content: Any, kind: str) -> httpx.Response:
    """Ask for the prediction of a body of some content type."""
    headers = {"content-type": kind}
    return client.post("/predict", content=content, headers=headers)


def refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    document = answer.json()
    assert set(document) == {"error", "message"}
    assert words in document["message"]
