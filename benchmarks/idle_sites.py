"""Cost of idle sites for the server, in percent of a core.

The server is ``knnper fed server``: the gateway, and Flower's SuperLink behind it. The
sites send what ``knnper fed client`` sends: requests for messages, with its pauses, and
Flower's signs of life. The baseline is the SuperLink alone where each site asks it for
messages once a second: the cost of a request times the number of sites.
"""

import argparse
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from google.protobuf.message import Message

from benchmarks.measurement import Measurement, make_parser, rounded, say
from benchmarks.real_federation import RealFederation, new_federation, serving
from knnper.client.node import PollPause
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import read_node_key

HEARTBEAT_S = 30.0  # interval announced by Flower's nodes
_TICKS = os.sysconf("SC_CLK_TCK")


class IdleSite:
    """A site that requests messages and gets none."""

    def __init__(self, federation: RealFederation, name: str) -> None:
        place = federation.folder.client(name)
        self.num_requests = 0
        self.node = Node()
        self._key = read_node_key(place / f"{name}.key")
        self._address = f"127.0.0.1:{federation.gateway}"
        self._http = flower.http_client(self._address, place / "ca.crt")
        self._has_ended = threading.Event()
        self._pause = PollPause()
        self._heartbeats = HeartbeatSender(self._send_heartbeat)

    def start(self) -> None:
        """Join the federation, and request messages until `stop`."""
        key = flower.public_pem(self._key.public_key())
        request = ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT_S)
        answer = self._post(flower.ACTIVATE, request)
        self.node = Node(node_id=ActivateNodeResponse.FromString(answer).node_id)
        self._heartbeats.start()
        threading.Thread(target=self._ask_for_messages, daemon=True).start()

    def stop(self) -> None:
        """Stop sending requests."""
        self._has_ended.set()
        self._heartbeats.stop()

    def ask(self, http: httpx.Client) -> None:
        """Request messages from another server."""
        request = PullMessagesRequest(node=self.node)
        headers = flower.signed_headers(self._key)
        flower.post(http, flower.PULL_MESSAGES, request, headers).raise_for_status()

    def _ask_for_messages(self) -> None:
        while not self._has_ended.is_set():
            with contextlib.suppress(httpx.HTTPError):
                self._post(flower.PULL_MESSAGES, PullMessagesRequest(node=self.node))
            self._pause.sleep()

    def _send_heartbeat(self) -> bool:
        request = SendNodeHeartbeatRequest(
            node=self.node, heartbeat_interval=HEARTBEAT_S
        )
        if self._pause.is_heard:
            return True
        with contextlib.suppress(httpx.HTTPError):
            self._post(flower.HEARTBEAT, request)
        return True

    def _post(self, path: str, request: Message) -> bytes:
        self.num_requests += 1
        headers = flower.signed_headers(self._key)
        answer = flower.post(self._http, path, request, headers)
        return answer.raise_for_status().content


def measure(
    num_sites: int, settle_s: float, seconds: float, repetitions: int
) -> Measurement:
    """Measure the share of a core used by idle sites, and that of the baseline."""
    with new_federation(num_sites) as federation, serving(federation) as running:
        gateway = running.processes[0].pid
        superlink = _superlink(gateway)
        with _idle_sites(federation) as sites:
            say(f"idle_sites: {num_sites} sites have nothing to do for {settle_s:g} s")
            time.sleep(settle_s)
            gateways, superlinks, requests, baselines = [], [], [], []
            for repetition in range(repetitions):
                say(f"idle_sites: repetition {repetition + 1} of {repetitions}")
                before, began = _requests(sites), time.monotonic()
                used = _cpu_s(gateway), _cpu_s(superlink)
                time.sleep(seconds)
                wall_s = time.monotonic() - began
                gateways.append(100 * (_cpu_s(gateway) - used[0]) / wall_s)
                superlinks.append(100 * (_cpu_s(superlink) - used[1]) / wall_s)
                requests.append(60 * (_requests(sites) - before) / wall_s / num_sites)
                cost_s = _cost_of_a_request(federation, sites, superlink, superlinks)
                baselines.append(100 * cost_s * num_sites)
    values = [sum(both) for both in zip(gateways, superlinks, strict=True)]
    pairs = zip(values, baselines, strict=True)
    details: dict[str, object] = {
        "sites": num_sites,
        "ratio": rounded(statistics.median(share / other for share, other in pairs)),
        "gateway": rounded(statistics.median(gateways)),
        "superlink": rounded(statistics.median(superlinks)),
        "requests_per_site_and_minute": rounded(statistics.median(requests)),
    }
    baseline_is = (
        "percent of a core that Flower's SuperLink alone takes where each site asks "
        "for messages once a second"
    )
    return Measurement("idle_sites", values, baselines, baseline_is, details)


@contextlib.contextmanager
def _idle_sites(federation: RealFederation) -> Iterator[Sequence[IdleSite]]:
    sites = [IdleSite(federation, name) for name in federation.names]
    try:
        for site in sites:
            site.start()
        yield sites
    finally:
        for site in sites:
            site.stop()


def _cost_of_a_request(
    federation: RealFederation,
    sites: Sequence[IdleSite],
    superlink: int,
    idle_percent: Sequence[float],
) -> float:
    """Measure the CPU seconds of the SuperLink per request for messages."""
    count = 200
    ca = federation.folder.server / "state" / "flwr" / "tls" / "ca.crt"
    with flower.http_client(f"127.0.0.1:{federation.control}", ca) as http:
        began, used_s = time.monotonic(), _cpu_s(superlink)
        for number in range(count):
            sites[number % len(sites)].ask(http)
        wall_s, used_s = time.monotonic() - began, _cpu_s(superlink) - used_s
    return max(used_s - wall_s * idle_percent[-1] / 100, 0.0) / count


def _superlink(server: int) -> int:
    """Find the process id of the SuperLink among the server's children."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if b"superlink" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    raise RuntimeError(f"the server, process {server}, has no SuperLink")


def _requests(sites: Sequence[IdleSite]) -> int:
    return sum(site.num_requests for site in sites)


def _cpu_s(process: int) -> float:
    """Return the CPU seconds (user and system) of a process. Linux only."""
    status = Path(f"/proc/{process}/stat").read_text()
    # The command's name is in parentheses and may contain any character.
    fields = status.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument(
        "--settle-s", type=float, default=60, help="idle before the measurement"
    )
    parser.add_argument("--seconds", type=float, default=40, help="of a repetition")
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    measurement = measure(
        options.sites, options.settle_s, options.seconds, options.repetitions
    )
    print(measurement.as_json())


if __name__ == "__main__":
    main()
