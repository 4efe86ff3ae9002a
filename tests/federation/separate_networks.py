"""Machines that see each other over a network: namespaces joined by a bridge."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

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

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

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

    def _make(self) -> None:
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

    def _remove(self) -> None:
        for name in reversed(self._made):
            _ip("netns", "del", name)
        self._made.clear()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
