"""The story with every machine in a network of its own, and a link that breaks."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence

import pytest

from tests.federation.site_tricks import HOLD, training
from tests.federation.small_federation import SEEN, Federation, Found
from tests.processes import wait_until

SUBNET = "10.213.7"
PREFIX_BITS = 24
LINK = "eth0"


def why_not() -> str:
    """Return why there can be none here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (package iproute2)"
    tried = subprocess.run(
        ["unshare", "-n", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip()


class Network:
    """A namespace a machine, and one for the bridge; the host's own is not touched."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._tag = uuid.uuid4().hex[:6]
        self._machines = list(machines)
        self._made: list[str] = []

    def address(self, machine: str) -> str:
        return f"{SUBNET}.{self._machines.index(machine) + 1}"

    @property
    def inside(self) -> dict[str, Sequence[str]]:
        """What a command begins with that runs on a machine."""
        return {
            name: ["ip", "netns", "exec", self._namespace(name)]
            for name in self._machines
        }

    def cut(self, machine: str) -> None:
        """Take a machine's link away; it is not told."""
        self._set_port(machine, "down")

    def mend(self, machine: str) -> None:
        self._set_port(machine, "up")

    def _set_port(self, machine: str, state: str) -> None:
        # At the bridge: the machine's own address and route stay.
        _ip("-n", self._hub, "link", "set", self._port(machine), state)

    @property
    def _hub(self) -> str:
        return f"knnper-{self._tag}-hub"

    def _namespace(self, machine: str) -> str:
        return f"knnper-{self._tag}-{machine}"

    def _port(self, machine: str) -> str:
        return f"port{self._machines.index(machine)}"

    def make(self) -> None:
        self._make_namespace(self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for machine in self._machines:
            self._join(machine)

    def _join(self, machine: str) -> None:
        inner, port = self._namespace(machine), self._port(machine)
        self._make_namespace(inner)
        peer = ("peer", "name", LINK, "netns", inner)
        _ip("-n", self._hub, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        address = f"{self.address(machine)}/{PREFIX_BITS}"
        _ip("-n", inner, "address", "add", address, "dev", LINK)
        _ip("-n", inner, "link", "set", LINK, "up")

    def _make_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in reversed(self._made):
            _ip("netns", "del", name)
        self._made.clear()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are namespaces"),
]

SERVER = "server"
CUT_OFF, LATE = "0001", "0003"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 5)"


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network([SERVER, *SEEN])
    try:
        made.make()
        yield made
    finally:
        made.remove()


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

    # Waited for in round 2 until Flower, after a minute, takes it for gone.
    patient = "run.federation.round_patience=60"
    submitted, run = federation.submit("training.num_rounds=4", patient)
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


def _is_online(federation: Federation, name: str) -> bool:
    words = federation.start(
        SERVER, "list", "fed", "list", federation.server_file, "--json"
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
