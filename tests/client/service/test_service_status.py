"""What a service tells of itself."""

import json

import httpx

from tests.client.service.small_service import CLASSES, SmallServed, some_inputs


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
