"""A client's service, asked over HTTP."""

import io
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from trial.engine import TrialError

READY_S = 60.0


@dataclass(frozen=True)
class Service:
    """A service that serves or soon will."""

    address: str
    token: str

    def wait_until_ready(self) -> None:
        """Return when it predicts."""
        deadline = time.monotonic() + READY_S
        with self._http() as http:
            while not (answer := http.get("/ready")).is_success:
                if time.monotonic() > deadline:
                    raise TrialError(f"{self.address} is not ready: {answer.text}")
                time.sleep(0.2)

    def info(self) -> dict[str, Any]:
        """Return what is served."""
        with self._http() as http:
            found: dict[str, Any] = http.get("/info").raise_for_status().json()
            return found

    def predict(self, images: NDArray[Any]) -> list[dict[str, Any]]:
        """Return the answers for n images, shape (n, height, width, channels)."""
        file = io.BytesIO()
        np.save(file, images)
        with self._http() as http:
            answer = http.post(
                "/predict",
                content=file.getvalue(),
                headers={"content-type": "application/x-npy"},
            )
            found: list[dict[str, Any]] = answer.raise_for_status().json()[
                "predictions"
            ]
            return found

    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=60)
