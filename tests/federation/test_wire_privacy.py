"""No example and no embedding leaves a client, in training or in model distribution."""

import contextlib
import dataclasses
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from knnper.data.normalization import Normalizer
from knnper.strategies.core.exported_model import GlobalModel, load_model
from tests.federation.site_tricks import KEEP_MODELS, LEAK
from tests.federation.small_federation import SEEN, Federation, Found, Run
from tests.planted_values import PlantedValues
from tests.processes import LOCALHOST, wait_until


class Recorder:
    """Passes connections on to a server, and keeps what clients send."""

    def __init__(self, port: int) -> None:
        self._server = (LOCALHOST, port)
        self._listening = socket.create_server((LOCALHOST, 0))
        self._open: list[socket.socket] = []
        self._sent: list[bytearray] = []

    @property
    def address(self) -> str:
        return f"{LOCALHOST}:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        _in_background(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def bodies(self) -> list[bytes]:
        """Return the bodies of all requests that were sent so far."""
        return [body for sent in list(self._sent) for body in _bodies(bytes(sent))]

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            self._open += [client, server]
            sent = bytearray()
            self._sent.append(sent)
            _in_background(_pass_on, client, server, sent)
            _in_background(_pass_on, server, client, bytearray())


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            kept += part
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


def _in_background(work: Callable[..., None], *arguments: object) -> None:
    def quietly() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            work(*arguments)

    threading.Thread(target=quietly, daemon=True).start()


def _bodies(sent: bytes) -> Iterator[bytes]:
    """Yield the bodies of the requests of one connection; none may be disguised."""
    while b"\r\n\r\n" in sent:
        head, _, sent = sent.partition(b"\r\n\r\n")
        assert not re.search(rb"(?im)^(transfer|content)-encoding:", head), head
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        yield sent[:size]
        sent = sent[size:]
    assert not sent, "more than requests was sent"


pytestmark = pytest.mark.slow
Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture
def federation(found: Found) -> Federation:
    return found("--insecure")


def test_neither_examples_nor_embeddings_leave_a_client(federation: Federation) -> None:
    federation.server()
    with Recorder(federation.port) as recorder:
        for name in SEEN:
            federation.configure(name, server=recorder.address)
            federation.tricks(name).plan({"models": KEEP_MODELS})
        federation.clients()
        submitted, run = federation.submit("run.federation.min_clients=3")
        assert submitted.wait() == 0
        bodies = recorder.bodies()
        _require_whole_recording(bodies, run)
        secrets = _secrets(federation, run)
        for form, secret in secrets.items():
            assert len(secret) > 1000, f"too little to look for: {form}"
            assert secret.count_in(bodies) == 0, form

        # The same search finds what is sent on purpose.
        _send_on_purpose(federation, run)
        assert federation.resume(run, stay=60).wait() == 0
        wait_until(
            lambda: all(
                secret.count_in(recorder.bodies()) for secret in secrets.values()
            ),
            "the search finds every form",
        )


def _require_whole_recording(bodies: list[bytes], run: Run) -> None:
    """All updates were recorded, and hardly anything else."""
    num_bytes = sum(map(len, bodies))
    bytes_up = sum(record["bytes_up"] for record in run.rounds)
    assert bytes_up < num_bytes < bytes_up + 400_000


def _secrets(federation: Federation, run: Run) -> dict[str, PlantedValues]:
    """Return the values that must not leave a client, by form."""
    model = load_model(run.folder / "model")
    clients = [_forms(federation.client_folder(name), model) for name in SEEN]
    return {
        form: PlantedValues(np.concatenate([forms[form] for forms in clients]))
        for form in clients[0]
    }


def _forms(folder: Path, model: GlobalModel) -> Arrays:
    images = _images(folder)
    embeddings = _embeddings(folder, images, model)
    return {
        **_as_numbers(images, model),
        "embeddings": embeddings,
        "float64 embeddings": embeddings.astype(np.float64),
    }


def _as_numbers(images: NDArray[np.uint8], model: GlobalModel) -> Arrays:
    """Return the images in every form that a program may hold them in."""
    normalized = Normalizer(model.spec)(torch.from_numpy(images)).numpy()
    return {
        "images": images,
        "float32 images": images.astype(np.float32),
        "float64 images": images.astype(np.float64),
        "images of up to 1": (images / 255).astype(np.float32),
        "normalised images": np.ascontiguousarray(normalized),
    }


def _embeddings(
    folder: Path, images: NDArray[np.uint8], model: GlobalModel
) -> NDArray[np.float32]:
    """Return those by every model that the client has had in its hands."""
    models = [model, *_models(folder, model)]
    assert len(models) == 7
    parts = [one.embed(torch.from_numpy(images)).numpy() for one in models]
    return np.concatenate(parts)


def _models(folder: Path, model: GlobalModel) -> Iterator[GlobalModel]:
    for kind in ("sent", "trained"):
        for file in sorted(folder.glob(f"{kind}-*.npy")):
            weights = torch.from_numpy(np.load(file))
            yield dataclasses.replace(model, weights=weights)


def _images(folder: Path) -> NDArray[np.uint8]:
    with np.load(folder / "data.npz") as arrays:
        splits = [arrays[f"{name}_inputs"] for name in ("train", "validation", "test")]
    images: NDArray[np.uint8] = np.concatenate(splits)
    return images


def _send_on_purpose(federation: Federation, run: Run) -> None:
    """Have a client send a single image in each form, and half an embedding."""
    folder, model = federation.client_folder(SEEN[0]), load_model(run.folder / "model")
    image = _images(folder)[:1]
    leaks = _as_numbers(image, model)
    half = model.embed(torch.from_numpy(image)).numpy()[:, 5:37]
    leaks |= {"embedding": half, "float64 embedding": half.astype(np.float64)}
    for what, values in leaks.items():
        np.save(folder / f"leak-{what.replace(' ', '-')}.npy", values)
    federation.tricks(SEEN[0]).plan({"introduction": LEAK})
