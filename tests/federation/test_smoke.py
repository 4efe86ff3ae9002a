"""The shortest run over a real client; the whole story is in `test_story`."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from knnper.audit_log import AuditLog
from knnper.client.settings import read_client
from tests.federation.small_federation import Found
from tests.processes import KNNPER


def audited(state: Path, *words: object) -> list[Mapping[str, Any]]:
    """Verify an audit log by the command; return its entries."""
    entries = list(AuditLog.of(state).entries())
    command = [str(word) for word in (KNNPER, *words)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert f"head: {entries[-1]['hash']}" in done.stdout
    return entries


@pytest.mark.integration
def test_a_client_trains_and_is_handed_the_model(found: Found) -> None:
    federation = found(clients=["0000"])
    federation.server()
    node = federation.client("0000")
    node.wait_for("in the federation of")
    submitted, run = federation.submit("training.num_rounds=1")
    assert submitted.wait() == 0
    assert list(run.clients) == ["0000"]
    assert (federation.client_folder("0000") / "state/serving.json").exists()
    assert node.stop() == 0

    # The audit logs of both sides name the same run.
    state = federation.server_file.parent / "state"
    server = audited(state, "fed", "audit", federation.folder)
    assert [entry["event"] for entry in server] == [
        "register_client",
        "submit_run",
        "run_begins",
        "exchange",
        "round_finished",
        "trained",
        "exchange",
    ]
    begins, trained = server[2], server[3]
    assert (trained["purpose"], trained["answered"]) == ("train", ["0000"])
    file = federation.client_file("0000")
    site = audited(read_client(file).state, "site", "audit", file)
    messages = [entry for entry in site if entry["event"] == "message"]
    assert [entry["purpose"] for entry in messages] == [
        "query",
        "train",
        "evaluate.personalize",
    ]
    for entry in messages:
        assert entry["run"] == begins["run"]
        assert entry["experiment"] == begins["experiment"]
        assert entry["outcome"] == "answered"
