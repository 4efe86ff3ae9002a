"""What is checked before Flower starts."""

import socket

import pytest

from knnper.config.errors import RunError
from knnper.config.sections import RunSettings
from knnper.transport.polling import MESSAGES_AT_ONCE
from simulation.flower_runtime import requests_at_once, require_cluster


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


def test_something_at_a_clusters_address_is_enough() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        require_cluster(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", [None, "auto", "ray://127.0.0.1:1", "local"])
def test_what_ray_resolves_itself_is_left_to_ray(address: str | None) -> None:
    require_cluster(address)


def test_many_workers_are_sent_more_requests() -> None:
    assert requests_at_once(RunSettings(num_workers=2)) == MESSAGES_AT_ONCE
    assert requests_at_once(RunSettings(num_workers=100)) == 400
    assert requests_at_once(RunSettings(ray_address="auto")) == 256
