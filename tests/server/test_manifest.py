from datetime import UTC, datetime

import knnper
from knnper.server.run_folder import build_manifest


def test_manifest() -> None:
    manifest = build_manifest(
        results_identity="e1",
        partition_hash="p1",
        command=("knnper", "simulate"),
        started=datetime(2030, 1, 2, 3, 4, 5, 678, UTC),
    )
    assert manifest["results_identity"] == "e1"
    assert manifest["partition_hash"] == "p1"
    assert manifest["command"] == ["knnper", "simulate"]
    assert manifest["started"] == "2030-01-02T03:04:05+00:00"
    assert manifest["versions"]["knnper"] == knnper.__version__
    assert manifest["versions"]["flwr"].startswith("1.")
    assert manifest["versions"]["python"].startswith("3.")
    assert manifest["num_cpus"] >= 1
