"""The story with every machine in a network of its own, and a link that breaks."""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.federation.separate_networks import Network, why_not
from tests.federation.site_tricks import HOLD, training
from tests.federation.small_federation import SEEN, UNSEEN, Example, Federation, Found
from tests.processes import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are namespaces"),
]
SERVER = "server"
CUT_OFF, LATE = "0001", "0003"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 5)"


@pytest.fixture
def network() -> Iterator[Network]:
    with Network([SERVER, *SEEN, UNSEEN]) as made:
        yield made


@pytest.fixture
def federation(network: Network, found: Found) -> Federation:
    return found(host=network.address(SERVER), inside=network.inside)


def test_a_broken_link_and_a_late_client(
    federation: Federation, network: Network
) -> None:
    cut_off, late = federation.tricks(CUT_OFF), federation.tricks(LATE)
    cut_off.plan({training(2): HOLD})
    late.plan({training(3): HOLD})
    federation.server()
    nodes = federation.clients()
    _require_only_the_gateway(federation, network)

    submitted, run = federation.submit("training.num_rounds=4")
    wait_until(lambda: cut_off.is_at(training(2)), "round 2 is under way")
    network.cut(CUT_OFF)
    cut_off.plan({})
    cut_off.let_go(training(2))
    wait_until(lambda: late.is_at(training(3)), "round 3 is under way")
    network.mend(CUT_OFF)
    wait_until(
        lambda: _is_online(federation, CUT_OFF), "the node is in the federation again"
    )
    late.plan({})
    late.let_go(training(3))

    assert submitted.wait() == 0
    assert [one["num_clients"] for one in run.rounds] == [3, 2, 2, 3]
    assert [one["num_failed"] for one in run.rounds] == [0, 1, 1, 0]
    log = federation.run_log
    assert f"round 2: client {CUT_OFF} failed: " in log
    assert f"round 3: client {CUT_OFF} failed: it is not connected" in log
    assert set(run.clients) == set(SEEN)
    assert not any(node.ended for node in nodes.values())


def test_story_across_networks(federation: Federation, example: Example) -> None:
    federation.server()
    federation.clients()
    submitted, run = federation.submit()
    assert submitted.wait() == 0
    run.require_same(example.reference, SEEN)
    federation.add_client(UNSEEN)
    assert federation.resume(run, stay=120).wait() == 0
    file = federation.client_file(UNSEEN)
    onboarding = federation.start(
        UNSEEN, "onboard", "site", "onboard", file, "--no-serve"
    )
    assert onboarding.wait() == 0
    wait_until(lambda: UNSEEN in run.clients, "the unseen client is in the results")
    run.require_same(example.reference, [*SEEN, UNSEEN])


def _is_online(federation: Federation, name: str) -> bool:
    words = federation.start(
        SERVER, "list", "federation", "list", federation.server_file, "--json"
    )
    assert words.wait() == 0
    found = json.loads(words.written)
    return any(one["name"] == name and one["status"] == "online" for one in found)


def _require_only_the_gateway(federation: Federation, network: Network) -> None:
    """From a client's network the server's other port cannot be reached."""
    for machine, port, reached in (
        (SEEN[0], federation.port, True),
        (SEEN[0], federation.control_port, False),
    ):
        command = [*network.inside[machine], sys.executable, "-c", CONNECT]
        words = [*command, network.address(SERVER), str(port)]
        tried = federation.commands.start(f"reach-{port}", words)
        assert (tried.wait() == 0) is reached, tried.written
        assert reached or "ConnectionRefusedError" in tried.written
