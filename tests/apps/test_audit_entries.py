"""The entries of a run in the audit logs of its server and its sites."""

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import knnper
from knnper.audit_log import AuditLog, Recorder
from knnper.cli.app import app
from knnper.cli.flower_apps import Order, lead_sites
from knnper.experiment_file import results_identity
from knnper.server.observer import LoggingObserver, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import over_sites
from knnper.simulation.trained_model import find_model
from tests.apps.site_grid import SiteGrid, experiment

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]
SEEN = ("0000", "0001", "0003")
RUN = 7
MODEL_REFUSED = (
    "the site's own settings do not allow it: found the model tiny_cnn, expected mlp "
    "(limits.models)"
)


def entries(state: Path) -> list[dict[str, Any]]:
    return [dict(entry) for entry in AuditLog.of(state).entries()]


def of_events(state: Path, event: str) -> list[dict[str, Any]]:
    return [entry for entry in entries(state) if entry["event"] == event]


class LeavingClient(LoggingObserver):
    """Takes a client off the network after the first round."""

    def __init__(self, record: Recorder, grid: SiteGrid, node: int) -> None:
        super().__init__(logging.getLogger("flwr"), record)
        self._grid, self._node = grid, node

    def round_finished(self, record: RoundRecord) -> None:
        super().round_finished(record)
        self._grid.nodes.discard(self._node)


def led(tmp_path: Path, files: dict[str, Path]) -> RunFolder:
    """Lead a run over three sites, as the server's own process does."""
    grid = SiteGrid({10 + place: files[name] for place, name in enumerate(SEEN)})
    settings = experiment(**{"run.max_failed_fraction": 0.5})
    order = Order(over_sites(settings), tmp_path / "run", False, False, None)
    record = functools.partial(AuditLog.of(tmp_path / "server").append, run=RUN)
    observer = LeavingClient(record, grid, 12)
    return lead_sites(grid, order, observer, record)  # type: ignore[arg-type]


@pytest.fixture
def refusing(files: dict[str, Path]) -> dict[str, Path]:
    """Return the sites; 0001 does not accept the experiment's model."""
    file = files["0001"]
    file.write_text(f"{file.read_text()}limits: {{models: [mlp]}}\n")
    return files


def test_logs_of_server_and_sites_hold_who_asked_and_answered(
    tmp_path: Path, refusing: dict[str, Path]
) -> None:
    ran = led(tmp_path, refusing)
    identity = results_identity(over_sites(experiment()))
    model = find_model(ran.path / "model").fingerprint

    # 1. A site that takes part.
    state = tmp_path / "state-0000"
    messages = of_events(state, "message")
    assert [(entry["purpose"], entry["round"]) for entry in messages] == [
        ("query", 0),
        ("train", 1),
        ("evaluate.validate", 1),
        ("train", 2),
        ("evaluate.validate", 2),
        ("evaluate.personalize", 2),
    ]
    for entry in messages:
        assert entry["experiment"] == identity
        assert (entry["method"], entry["model"]) == ("knn_per", "tiny_cnn")
        assert (entry["outcome"], entry["run"]) == ("answered", 1)
        assert entry["server"] == "127.0.0.1:1"
        assert (entry["limits"], entry["version"]) == ({}, knnper.__version__)
        assert (entry["train"], entry["share_metrics"]) == (True, True)
    (installed,) = of_events(state, "install_model")
    assert (installed["model"], installed["took_part"]) == (model, True)

    # 2. The site that refuses.
    (question, refusal) = of_events(tmp_path / "state-0001", "message")
    assert question["limits"] == {"models": ["mlp"]}
    assert (question["outcome"], question["reason"]) == ("refused", MODEL_REFUSED)
    assert refusal["purpose"] == "query.refuse"
    assert MODEL_REFUSED in refusal["reason"]

    # 3. The server.
    server = tmp_path / "server"
    (begins,) = of_events(server, "run_begins")
    assert (begins["run"], begins["experiment"]) == (RUN, identity)
    (refused,) = of_events(server, "client_refused")
    assert MODEL_REFUSED in refused["reason"]
    exchanges = of_events(server, "exchange")
    assert [(entry["purpose"], entry["round"]) for entry in exchanges] == [
        ("train", 1),
        ("evaluate.validate", 1),
        ("train", 2),
        ("evaluate.validate", 2),
        ("evaluate.personalize", 2),
    ]
    for place, entry in enumerate(exchanges):
        is_there = place < 2
        assert ("0003" in entry["answered"]) is is_there
        assert "0000" in entry["answered"]
        failed = {} if is_there else {"0003": "it is not connected"}
        assert entry["failed"] == failed
    first, second = of_events(server, "round_finished")
    assert (first["num_clients"], first["num_failed"]) == (2, 0)
    assert (second["num_clients"], second["failures"]) == (1, exchanges[2]["failed"])
    (trained,) = of_events(server, "trained")
    assert trained["model"] == model

    # 4. Neither holds a name of a file, or a count of labels.
    with np.load(tmp_path / "shares" / "0000.npz") as arrays:
        counts = np.bincount(arrays["train_labels"], minlength=10).tolist()
    for folder in (state, server):
        text = AuditLog.of(folder).path.read_text()
        for private in ("npz", "train/", str(counts)):
            assert private not in text


def command(*words: object) -> Any:
    # Wide enough for each message to stand in one line.
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


def test_command_shows_entries_and_finds_an_altered_line(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    file = files["0000"]
    log = AuditLog.of(tmp_path / "state-0000")
    assert command("site", "audit", file).exit_code == 0
    for number in range(11):
        head = log.append("message", run=number)
    shown = command("site", "audit", file, "--expect-head", head)
    assert shown.exit_code == 0, shown.output
    assert f"head: {head}" in shown.stdout
    assert "entries: 11 in" in shown.stdout
    assert '{"run": 1}' in shown.stdout
    assert '{"run": 10}' in shown.stdout
    assert '{"run": 0}' not in shown.stdout
    part = command("site", "audit", file, "--expect-head", head[:8])
    assert part.exit_code == 2
    assert f"found '{head[:8]}', expected" in part.stderr
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join([*lines[:2], lines[2][:40]]))
    cut_off = command("site", "audit", file)
    assert cut_off.exit_code == 0
    assert "entries: 2 in" in cut_off.stdout
    shortened = command("site", "audit", file, "--expect-head", head)
    assert shortened.exit_code == 1
    assert "none of 2 entries" in shortened.stderr
    log.path.write_text("".join([lines[0], lines[2]]))
    altered = command("site", "audit", file)
    assert altered.exit_code == 1
    assert "line 2 of" in altered.stderr
