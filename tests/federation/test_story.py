"""From an experiment to predictions served on each machine, with real processes."""

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.federation.small_federation import (
    SEEN,
    UNSEEN,
    Example,
    Federation,
    Found,
    Run,
)
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


pytestmark = pytest.mark.slow


def test_train_personalise_stop_start_serve_and_onboard(
    found: Found, example: Example
) -> None:
    federation = found()
    server = federation.server()
    nodes = [federation.client(name) for name in SEEN]
    submitted, run = federation.submit()
    assert submitted.wait() == 0
    run.require_same(example.reference, SEEN)
    _stop(*nodes, server)

    server = federation.server()
    nodes = [federation.client(name) for name in SEEN]
    for name in SEEN:
        _require_served(federation, run, name)

    federation.add_client(UNSEEN)
    staying = federation.resume(run, stay=120)
    onboarding = federation.start(
        UNSEEN, "onboard", "site", "onboard", federation.client_file(UNSEEN)
    )
    onboarding.wait_for("expected gain over the global model|falls back to the global")
    _require_figures(onboarding, federation, run, UNSEEN)
    run.require_same(example.reference, [*SEEN, UNSEEN])
    _stop(onboarding, *nodes, server)
    assert staying.wait() == 0


def _stop(*running: Running) -> None:
    for one in running:
        assert one.stop() == 0, one.log


def _require_served(federation: Federation, run: Run, name: str) -> None:
    """What a client serves does as well as the run says."""
    serve = federation.start(
        name, f"serve-{name}", "site", "serve", federation.client_file(name)
    )
    _require_figures(serve, federation, run, name)
    _stop(serve)


def _require_figures(
    serve: Running, federation: Federation, run: Run, name: str
) -> None:
    row, share = run.clients[name], federation.client_folder(name) / "data.npz"
    with asked(serve, federation.client_folder(name) / "state") as service:
        info, figures = service.info(), measured(service, share)
    assert info["client"] == name
    assert info["knn_weight"] == float(row["knn_weight"])
    num_remembered = int(row["num_train"]) + int(row["num_validation"])
    assert info["store"]["num_stored"] == num_remembered
    for found, name in (
        (figures.accuracy, "accuracy"),
        (figures.accuracy_global, "accuracy_global"),
    ):
        assert found == pytest.approx(float(row[name]), abs=figures.undecided)
    assert figures.log_loss == pytest.approx(float(row["log_loss"]), rel=1e-5)


def test_the_run_has_the_same_figures(
    found: Found, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = found()
    monkeypatch.setenv("KNNPER_PLAIN_FLOWER", "1")
    server = federation.server()
    nodes = [federation.client(name, "--allow-app-code") for name in SEEN]
    submitted, run = federation.submit()
    assert submitted.wait() == 0
    run.require_same(example.reference, SEEN)
    for one in (*nodes, server):
        assert one.stop() == 0, one.log


def test_a_node_that_may_not_run_the_apps_code_says_so(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = found(clients=["0000"])
    monkeypatch.setenv("KNNPER_PLAIN_FLOWER", "1")
    node = federation.client("0000")
    assert node.wait() != 0
    assert "--allow-app-code" in node.log.read_text()
