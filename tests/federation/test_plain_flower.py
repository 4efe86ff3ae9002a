"""A federation without what Flower keeps to itself: the same run, slower."""

import pytest

from tests.federation.small_federation import SEEN, Example, Found


@pytest.mark.slow
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
