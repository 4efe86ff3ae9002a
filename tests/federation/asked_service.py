"""What a client's service answers about the client's own test share."""

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.processes import Running, wait_until

AT_ONCE = 200


@dataclass(frozen=True)
class Service:
    """A ``knnper site serve`` that is ready."""

    http: httpx.Client

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/info").raise_for_status().json()
        return found

    def predict(self, images: NDArray[Any]) -> list[dict[str, Any]]:
        """Return the answers for n images, shape (n, height, width, channels)."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(images), AT_ONCE):
            file = io.BytesIO()
            np.save(file, images[start : start + AT_ONCE])
            answer = self.http.post(
                "/predict",
                content=file.getvalue(),
                headers={"content-type": "application/x-npy"},
            )
            found += answer.raise_for_status().json()["predictions"]
        return found


@contextlib.contextmanager
def asked(serve: Running, state: Path) -> Iterator[Service]:
    """Give the service that a process offers, once it is ready."""
    address = serve.wait_for(r"serves at (\S+)")
    token = (state / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
        wait_until(lambda: http.get("/ready").is_success, "the service is ready")
        yield Service(http)


@dataclass(frozen=True)
class Figures:
    """How a client does on its test share."""

    accuracy: float
    log_loss: float
    accuracy_global: float
    undecided: float


def measured(service: Service, share: Path) -> Figures:
    """Return how the service does on the test split of a client's file."""
    with np.load(share) as arrays:
        images, labels = arrays["test_inputs"], arrays["test_labels"].tolist()
    answers = service.predict(images)
    pairs = list(zip(answers, labels, strict=True))
    by_model, served = (
        np.array([list(one[name].values()) for one in answers])
        for name in ("global_probabilities", "probabilities")
    )
    gaps = [np.diff(np.sort(one, axis=1)[:, -2:]) for one in (by_model, served)]
    return Figures(
        accuracy=np.mean([one["label"] == label for one, label in pairs]).item(),
        log_loss=math.fsum(
            -math.log(one["probabilities"][str(label)]) for one, label in pairs
        )
        / len(labels),
        accuracy_global=np.mean(np.argmax(by_model, 1) == labels).item(),
        undecided=np.mean(np.minimum(*gaps) < 1e-5).item(),
    )
