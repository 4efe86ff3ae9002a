"""A service with private answers: answers, charges, withheld fields, refusals."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from knnper.client.service.tokens import SCOPES, add_token
from knnper.client.settings import read_client
from knnper.client.site_state import SiteState
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.datastore.store import open_store
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    SmallServed,
    asking,
    predicted,
    small_served,
    some_inputs,
    some_labels,
    tiny_model,
)
from tests.processes import KNNPER, Commands

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {name: image_folder, path: data}
service:
  port: 0
  privacy: {epsilon: 1e4, threshold: 0.1, vote_noise: 1e3, num_queries: 1000000}
"""

PRIVACY = PrivateAnswerSettings(
    epsilon=3.0, threshold=0.01, delta=1e-6, vote_noise=0.1, num_queries=50
)
ALL_SCOPES = {"predict", "probabilities", *SCOPES}


@pytest.fixture
def served(tmp_path: Path) -> SmallServed:
    served = small_served(tmp_path / "store", 60)
    served.privacy = PRIVACY
    return served


def inputs(count: int, seed: int = 0) -> list[Any]:
    nested: list[Any] = some_inputs(count, seed=seed).tolist()
    return nested


def bearer(folder: Path, name: str, *scopes: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {add_token(folder, name, scopes)}"}


def spent(served: SmallServed) -> Any:
    return served.store.charges(served.store.contents().ids)


def test_start_and_status_charge_nothing(served: SmallServed) -> None:
    with asking(served) as client:
        client.get("/info").raise_for_status()
        client.get("/metrics").raise_for_status()
        assert not spent(served).any()


def test_answer_is_charged_once_and_shows_no_stored_example(
    served: SmallServed,
) -> None:
    with asking(served) as client:
        answer = predicted(client, *inputs(3)).json()
        assert spent(served).max() > 0
        assert spent(served).max() <= PRIVACY.budget
    assert set(answer) == {"predictions", "model"}
    for row in answer["predictions"]:
        assert set(row) == {"label", "class_name", "probabilities"}
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["class_name"] == max(
            row["probabilities"], key=row["probabilities"].get
        )


def test_exhausted_memory_answers_as_the_global_model(served: SmallServed) -> None:
    served.privacy = PrivateAnswerSettings(epsilon=0.01, threshold=0.01, num_queries=1)
    with asking(served) as client:
        answer = predicted(client, *inputs(3)).json()
        assert client.get("/info").json()["privacy"]["share_voting"] == 0
    alone = served.model.head(served.model.embed(some_inputs(3)))
    rows = [list(row["probabilities"].values()) for row in answer["predictions"]]
    np.testing.assert_allclose(rows, alone, rtol=1e-6)


def test_vote_changes_answers_where_the_noise_is_small(served: SmallServed) -> None:
    served.privacy = PrivateAnswerSettings(
        epsilon=1e4, threshold=0.999, vote_noise=1e-3, knn_weight=1.0
    )
    with asking(served) as client:
        answer = predicted(client, *inputs(4)).json()
    # The queries are stored, and so their own nearest neighbours.
    labels = [row["label"] for row in answer["predictions"]]
    embeddings = served.model.embed(some_inputs(60))
    unit = torch.nn.functional.normalize(embeddings)
    near = unit[:4] @ unit.T >= 0.999
    votes = near.float() @ torch.nn.functional.one_hot(torch.arange(60) % 3).float()
    assert labels == votes.argmax(dim=1).tolist()


def test_info_states_the_guarantee_and_keeps_counts_for_the_owner(
    served: SmallServed, tmp_path: Path
) -> None:
    headers = bearer(tmp_path, "ward", *SCOPES)
    with asking(served, state=tmp_path) as client:
        owner = client.get("/info").json()
        other = client.get("/info", headers=headers).json()
    stated = {
        "epsilon": 3.0,
        "delta": 1e-6,
        "knn_weight": 0.7,
    }
    assert other["privacy"] == stated
    assert owner["privacy"] == {**stated, "share_voting": 1.0}
    assert "store" in owner
    assert not {"store", "accuracy", "knn_weight", "kernel_scale"} & set(other)
    assert set(other["scopes"]) == {"predict", "probabilities", "metrics"}


def test_paths_of_examples_are_left_to_the_owner(
    served: SmallServed, tmp_path: Path
) -> None:
    headers = bearer(tmp_path, "ward", *SCOPES)
    example = {"input": inputs(1)[0], "label": CLASSES[0]}
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/examples/1/image", None),
        ("POST", "/examples", {"examples": [example]}),
        ("DELETE", "/examples", {"ids": [1]}),
    ]
    with asking(served, state=tmp_path) as client:
        for method, path, body in requests:
            refused = client.request(method, path, json=body, headers=headers)
            assert refused.status_code == 403
            assert "while answers are private" in refused.json()["message"]
        assert len(served.store) == 60
        for method, path, body in requests:
            assert client.request(method, path, json=body).status_code == 200


def test_neighbours_are_withheld_from_all_tokens(
    served: SmallServed, tmp_path: Path
) -> None:
    headers = bearer(tmp_path, "ward", "neighbors")
    with asking(served, state=tmp_path) as client:
        answer = client.post(
            "/predict", json={"inputs": inputs(1)}, headers=headers
        ).json()
        assert set(answer["predictions"][0]) == {"label", "class_name", "probabilities"}
        only_class = bearer(tmp_path, "tablet", "predict")
        answer = client.post(
            "/predict", json={"inputs": inputs(1)}, headers=only_class
        ).json()
        assert set(answer["predictions"][0]) == {"label", "class_name"}


def test_neighbours_are_withheld_without_tokens(served: SmallServed) -> None:
    with asking(served, token=None) as client:
        assert "neighbors" not in client.get("/info").json()["scopes"]


def test_metrics_have_no_exact_counts(served: SmallServed) -> None:
    with asking(served) as client:
        predicted(client, *inputs(2)).raise_for_status()
        text = client.get("/metrics").text
    assert "knnper_store_examples" not in text
    assert "knnper_knn_weight" not in text


def test_simultaneous_requests_are_all_charged(served: SmallServed) -> None:
    with asking(served) as client, ThreadPoolExecutor(6) as threads:

        def ask(seed: int) -> httpx.Response:
            return predicted(client, *inputs(2, seed))

        answers = list(threads.map(ask, range(30)))
        assert [answer.status_code for answer in answers] == [200] * 30
        # Every query is near all examples, so the budget is spent, and never exceeded.
        assert spent(served).max() <= PRIVACY.budget * (1 + 1e-12)
        assert spent(served).max() > 0.9 * PRIVACY.budget


def test_service_without_privacy_answers_as_before(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store", 9)
    with asking(served) as client:
        answer = predicted(client, *inputs(2)).json()
        info = client.get("/info").json()
        expected = served.predict(some_inputs(2))
        assert not spent(served).any()
    rows = [list(row["probabilities"].values()) for row in answer["predictions"]]
    assert torch.tensor(rows).equal(expected.probabilities)
    assert set(answer) == {"predictions", "model", "knn_weight", "num_stored"}
    assert "privacy" not in info


@pytest.mark.slow
def test_killed_service_has_charged_every_answer(tmp_path: Path) -> None:
    train = NamedExamples(Examples(some_inputs(40), some_labels(40)), names(40))
    none = NamedExamples(Examples(some_inputs(0), some_labels(0)), ())
    data = SiteData(train, none, none, SiteTask(IMAGE, CLASSES, ()))
    state = tmp_path / "state"
    SiteState(state, "site-a").install(tiny_model(), data, took_part=False)
    config = tmp_path / "client.yaml"
    config.write_text(FILE)
    settings = read_client(config).service.privacy
    assert settings is not None
    answered = 0
    for number in range(3):
        with Commands(tmp_path / f"logs-{number}") as commands:
            service = commands.start("serve", [KNNPER, "site", "serve", config])
            address = service.wait_for(r"serves at.* (\S+)\n")
            service.wait_for("serving the model")
            assert "Answers are private" in service.written
            killing = threading.Timer(1.0, service.kill)
            killing.start()
            with httpx.Client(base_url=address, timeout=30) as client:
                token = (state / "token").read_text().strip()
                client.headers["authorization"] = f"Bearer {token}"
                with contextlib.suppress(httpx.TransportError):
                    while True:
                        predicted(client, *inputs(1)).raise_for_status()
                        answered += 1
            killing.join()
        with open_store(state / "store", writable=True) as store:
            charged = store.charges(store.contents().ids).max()
        # An answer costs what the release of the count costs, to a millionth.
        recorded = round(charged / settings.count_charge)
        assert answered <= recorded <= answered + 1
        answered = recorded
    assert answered > 3


def names(count: int) -> tuple[str, ...]:
    return tuple(f"train/{number}" for number in range(count))
