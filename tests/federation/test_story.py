"""From an experiment to predictions served on each machine, with real processes."""

import pytest

from tests.federation.asked_service import asked, measured
from tests.federation.small_federation import (
    SEEN,
    UNSEEN,
    Example,
    Federation,
    Found,
    Run,
)
from tests.processes import Running

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
