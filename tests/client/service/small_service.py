"""A service of a tiny model and a few stored digits, in one process."""

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from starlette.types import ASGIApp
from torch import Tensor
from typing_extensions import override

from knnper.client.served_model import ModelInUse, ServedModel
from knnper.client.service.app import make_service
from knnper.client.service.bodies import RequestLimits
from knnper.client.service.server import make_server
from knnper.client.service.tokens import Tokens
from knnper.client.settings import ServiceSettings
from knnper.client.state import Accuracy, Gain, Serving, TunedOn
from knnper.data.characters import CHARACTER_NAMES, NUM_TOKENS
from knnper.data.examples import InputSpec
from knnper.data.site_task import SiteTask
from knnper.datastore.examples import InputLayout, StoreSpec
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import Store, create_store
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.state.small_site import small_experiment, untrained

TOKEN = "a token of the tests"
JSON, NPY, PNG = "application/json", "application/x-npy", "image/png"
LIMITS = RequestLimits(
    max_inputs=4,
    max_request_bytes=20_000,
    max_pixels=1000,
    max_json_values=1000,
    poll_s=0.05,
)
CLASSES = ("cat", "dog", "eel")
IMAGE = InputSpec((8, 8, 1), len(CLASSES), (0.5,), (0.25,))
FEATURES = InputSpec((1, 1, 4), len(CLASSES), (0.0,) * 4, (1.0,) * 4, "float32")
TEXT = InputSpec((1, 1, 6), NUM_TOKENS, (), (), "token")
MODELS = {"uint8": "tiny_cnn", "float32": "mlp", "token": "stacked_lstm"}
SERVING = Serving(
    model="",
    knn_weight=0.5,
    num_neighbors=3,
    kernel="paper",
    kernel_scale=1.0,
    tuned_on=TunedOn("validation", 20),
    accuracy=Accuracy(0.6, 0.7, 0.8, 20, "validation"),
    expected_gain=Gain(0.2, 0.1, 20),
    num_train=10,
    num_validation=5,
    num_test=5,
    run="tests",
    installed=0.0,
)


def classes_of(spec: InputSpec) -> tuple[str, ...]:
    """Return the names of the labels."""
    return CHARACTER_NAMES if spec.dtype == "token" else CLASSES


def tiny_model(
    seed: int = 0, spec: InputSpec = IMAGE, feature_names: tuple[str, ...] = ()
) -> GlobalModel:
    """Return an untrained model."""
    model, run = {"name": MODELS[spec.dtype]}, {"seed": seed}
    document = small_experiment(model=model, run=run)
    return untrained(document, SiteTask(spec, classes_of(spec), feature_names))


def some_inputs(count: int, spec: InputSpec = IMAGE, seed: int = 0) -> Tensor:
    """Return random inputs of shape (count, ...)."""
    generator = RandomKey(seed, ("inputs",)).numpy()
    shape = (count, *spec.image_shape)
    if spec.stored_dtype == "uint8":
        limit = 256 if spec.dtype == "uint8" else spec.num_classes
        return torch.from_numpy(generator.integers(0, limit, shape, np.uint8))
    return torch.from_numpy(generator.standard_normal(shape, np.float32))


def some_labels(count: int) -> Tensor:
    """Return the labels 0, 1, 2, 0, 1, ..., shape (count,)."""
    return torch.arange(count) % len(CLASSES)


class SmallServed(ServedModel):
    """The least that serves."""

    def __init__(self, model: GlobalModel, store: Store) -> None:
        self.store, self._model = store, model
        self.privacy = None
        self.settings = replace(SERVING, model=model.fingerprint)
        self.is_closed = False
        self.predict(some_inputs(1, model.spec))

    @override
    def _current(self) -> ModelInUse:
        return self._use(self._model, self.settings)

    def refresh(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True
        self.store.close()


def small_served(
    folder: Path,
    count: int = 9,
    spec: InputSpec = IMAGE,
    settings: StoreSettings | None = None,
    feature_names: tuple[str, ...] = (),
) -> SmallServed:
    """Return a tiny model and a store on disk with ``count`` named examples."""
    model = tiny_model(spec=spec, feature_names=feature_names)
    layout = InputLayout(spec.image_shape, spec.stored_dtype)
    store_spec = StoreSpec(spec.num_classes, layout, classes_of(spec))
    store = create_store(
        folder, store_spec, model.embedding_dim, model.fingerprint, settings
    )
    served = SmallServed(model, store)
    if count:
        names = [f"train/{number:05d}" for number in range(count)]
        served.add(some_inputs(count, spec), some_labels(count), names)
    return served


@contextlib.contextmanager
def asking(
    served: ServedModel | Callable[[], ServedModel],
    *,
    token: str | None = TOKEN,
    limits: RequestLimits | None = None,
    state: Path = Path("no such folder"),
) -> Iterator[httpx.Client]:
    """Give a client of a service that is ready, and bears the owner's token."""
    limits = limits or RequestLimits(poll_s=0.05)
    open_served = served if callable(served) else lambda: served
    tokens = None if token is None else Tokens(state, token)
    app = make_service(
        "site-a",
        open_served,
        tokens=tokens,
        limits=limits,
        privacy=None if callable(served) else served.privacy,
    )
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with (
        running(app) as address,
        httpx.Client(base_url=address, headers=headers, timeout=30) as client,
    ):
        wait_until_ready(client)
        yield client


@contextlib.contextmanager
def running(app: ASGIApp, settings: ServiceSettings | None = None) -> Iterator[str]:
    """Give the address at which a thread of this process answers."""
    server = make_server(app, settings or ServiceSettings(port=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until_ready(client: httpx.Client) -> None:
    """Return when the service predicts."""
    pause = threading.Event()
    for _ in range(500):
        if client.get("/ready").status_code == 200:
            return
        pause.wait(0.01)
    raise TimeoutError("the service was not ready within five seconds")


def png(pixels: Tensor, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()[:, :, 0]).save(file, kind)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def predicted(client: httpx.Client, *inputs: Any) -> httpx.Response:
    """Ask for the prediction of inputs as JSON."""
    return client.post("/predict", json={"inputs": inputs})


def post(client: httpx.Client, content: Any, kind: str) -> httpx.Response:
    """Ask for the prediction of a body of some content type."""
    return client.post("/predict", content=content, headers={"content-type": kind})


def refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "message"}
    assert words in answer.json()["message"]
