"""What is checked before Flower starts."""

import socket

import pytest
import ray
from flwr.clientapp import ClientApp

from knnper.errors import RunError
from knnper.experiment import RunSettings
from knnper.simulation.flower_engine import play, requests_at_once, require_cluster
from knnper.transport.polling import MESSAGES_AT_ONCE


def test_nothing_at_a_clusters_address_is_said_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(RunError, match=f"found nothing at 127.0.0.1:{port}"):
        require_cluster(f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_an_address_that_cannot_be_is_an_error(address: str) -> None:
    with pytest.raises(RunError, match=r"correct run\.ray_address"):
        require_cluster(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_something_at_a_clusters_address_is_enough(host: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        require_cluster(f"{host}:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", [None, "auto", "ray://127.0.0.1:1", "local"])
def test_what_ray_resolves_itself_is_left_to_ray(address: str | None) -> None:
    require_cluster(address)


def test_many_workers_are_sent_more_requests() -> None:
    assert requests_at_once(RunSettings(num_workers=2)) == MESSAGES_AT_ONCE
    assert requests_at_once(RunSettings(num_workers=100)) == 400


def test_a_cluster_is_sent_as_many_requests_as_its_machines_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"Resources": {"CPU": cores}} for cores in (64.0, 7.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    run = RunSettings(ray_address="auto", cpus_per_client=2.0)
    assert requests_at_once(run) == 4 * (32 + 3)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            "The current node timed out during startup. This could be anything.",
            r"did not start in time.*too busy.*--engine serial.*Ray says: The current",
        ),
        (
            "no room for it.",
            r"failed: no room for it\. Check that the machine has what",
        ),
    ],
)
def test_why_ray_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    raised: str,
    expected: str,
) -> None:
    def init(**arguments: object) -> None:
        raise Exception(raised)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunError, match=expected):
        play(ClientApp(), 1, RunSettings(), lambda grid, stop: stop.wait(60))
    assert "Traceback" not in capfd.readouterr().err
