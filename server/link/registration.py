"""Bring Flower's registrations in line with the folder of authorized keys."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    ListRunsRequest,
    ListRunsResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
)
from google.protobuf.message import Message

from knnper.errors import RunError
from knnper.server.link.authorized import (
    AuthorizedFolder,
    Registered,
    read_roster,
    write_roster,
)
from knnper.server.link.superlink import control_authority
from knnper.server.settings import ServerSettings
from knnper.settings import is_name
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import Address, fingerprint

UNREGISTERED = "unregistered"
# Begin of the problem that `list_clients` reports while the server does not run.
ONLY_FOLDER = "Only clients of the folder are listed"
FINISHED = "finished"
logger = logging.getLogger(__name__)
AUTHORIZED = "authorized"  # status of a client in the folder that is not registered yet


@dataclass(frozen=True)
class RegisteredNode:
    """A SuperNode in Flower's registry."""

    node_id: str
    name: str
    key_sha256: str
    status: str


@dataclass(frozen=True)
class RunStatus:
    """State of a run in Flower."""

    state: str
    outcome: str = ""
    details: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended, with or without success."""
        return self.state == FINISHED


class ControlPort:
    """A connection to the SuperLink's control port; a context manager."""

    def __init__(self, address: Address, ca: Path | None) -> None:
        if ca is not None and not ca.exists():
            raise RunError(f"the server has never run: there is no {ca}; start it")
        self._address = address
        self._client = flower.http_client(str(address), ca, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def nodes(self) -> list[RegisteredNode]:
        """List all registered and unregistered nodes."""
        answer = self._call("list the nodes", "list-nodes", ListNodesRequest())
        nodes = ListNodesResponse.FromString(answer).nodes_info
        keys = [flower.read_public_key(node.public_key) for node in nodes]
        return [
            RegisteredNode(
                str(node.node_id),
                node.name,
                fingerprint(key) if key else "",
                node.status,
            )
            for node, key in zip(nodes, keys, strict=True)
        ]

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> str:
        """Register the client ``name``; return its node id."""
        request = RegisterNodeRequest(public_key=flower.public_pem(key), name=name)
        answer = self._call(f"register {name}", "register-node", request)
        return str(RegisterNodeResponse.FromString(answer).node_id)

    def unregister(self, node_id: str) -> None:
        """Unregister a node; its key cannot be registered again."""
        request = UnregisterNodeRequest(node_id=int(node_id))
        self._call(f"remove the node {node_id}", "unregister-node", request)

    def run_status(self, run_id: int) -> RunStatus:
        """Return the state of a run."""
        request = ListRunsRequest(run_id=run_id)
        answer = self._call(f"find the run {run_id}", "list-runs", request)
        runs = ListRunsResponse.FromString(answer).run_dict
        if run_id not in runs:
            lost = "its database may have been removed"
            raise RunError(f"the server knows no run {run_id}: {lost}")
        status = runs[run_id].status
        return RunStatus(status.status, status.sub_status, status.details)

    def finished_runs(self) -> list[int]:
        """Return the finished runs among the last 20.

        Listing a finished run makes Flower delete its messages and objects.
        """
        answer = self._call("list the runs", "list-runs", ListRunsRequest())
        runs = ListRunsResponse.FromString(answer).run_dict
        return [run_id for run_id, run in runs.items() if run.status.status == FINISHED]

    def _call(self, action: str, path: str, request: Message) -> bytes:
        try:
            answer = flower.post(self._client, flower.CONTROL + path, request)
        except httpx.HTTPError as error:
            raise RunError(
                f"Flower's control port {self._address} cannot be reached to {action} "
                f"({error}); does the server run on this machine?"
            ) from error
        if answer.is_success:
            return answer.content
        why = flower.FlowerError.of(answer.text).detail or f"HTTP {answer.status_code}"
        raise RunError(f"Flower did not {action}: {why}")


def control_port(settings: ServerSettings) -> ControlPort:
    """Connect to the control port of the server on this machine."""
    return ControlPort(settings.control_address, control_authority(settings))


def reconcile(
    folder: AuthorizedFolder,
    registry: ControlPort,
    roster_file: Path,
    *,
    by_key: bool = True,
) -> dict[str, Registered]:
    """Register new clients of ``folder``, unregister others, write the roster."""
    if not folder.path.is_dir():
        outcome = "registrations stay as they are"
        raise RunError(f"there is no folder {folder.path}; {outcome}")
    before = read_roster(roster_file)
    keys, problems = folder.keys()
    counts, count_problems = folder.counts()
    warnings = [f"not registered: {entry}" for entry in problems]
    for problem in [*warnings, *(f"not fixed: {entry}" for entry in count_problems)]:
        logger.warning("%s", problem)
    names = {fingerprint(key): name for name, key in keys.items()}
    adopts = roster_file.exists() or not by_key
    roster, removed = _unregister_removed(registry, names, counts, before, adopts)
    registered = {entry.key_sha256 for entry in roster.values()}
    for key_sha256, name in names.items():
        if key_sha256 in removed:
            message = (
                "not registered: the key %s (%s) was removed once; make it another one"
            )
            logger.warning(message, name, key_sha256)
        elif key_sha256 not in registered:
            node_id = registry.register(name, keys[name])
            roster[node_id] = _folder_entry(name, key_sha256, counts)
            logger.info("registered %s (%s)", name, key_sha256)
    if roster != before or not roster_file.exists():
        write_roster(roster_file, roster)
    return roster


def _unregister_removed(
    registry: ControlPort,
    names: Mapping[str, str],
    counts: Mapping[str, int],
    before: Mapping[str, Registered],
    adopts: bool,
) -> tuple[dict[str, Registered], set[str]]:
    """Unregister nodes without a key; return the others, and unregistered keys."""
    roster: dict[str, Registered] = {}
    removed: set[str] = set()
    for node in registry.nodes():
        name, known = names.get(node.key_sha256), before.get(node.node_id)
        if node.status == UNREGISTERED:
            removed.add(node.key_sha256)
        elif name is not None:
            roster[node.node_id] = _folder_entry(name, node.key_sha256, counts)
        elif (why := _why_removed(node, known, adopts, names.values())) is not None:
            registry.unregister(node.node_id)
            removed.add(node.key_sha256)
            logger.warning("%s (%s)", why, node.key_sha256)
        else:
            used_names = {*names.values(), *(client.name for client in roster.values())}
            roster[node.node_id] = _adopt_node(node, used_names)
    return roster, removed


def _folder_entry(name: str, key_sha256: str, counts: Mapping[str, int]) -> Registered:
    return Registered(name, key_sha256, "folder", counts.get(name))


def _why_removed(
    node: RegisteredNode, known: Registered | None, adopts: bool, names: Collection[str]
) -> str | None:
    """Return why a node without a key in the folder is removed; None to keep it."""
    if known is not None and known.source == "folder":
        if known.name in names:
            return f"the key of {known.name} was replaced; the old one is revoked"
        return f"removed {known.name}: its key is gone"
    if known is not None or adopts:
        return None
    why = "it has no key in the folder, and no roster records how it was registered"
    return (
        f"removed {node.name or node.node_id}: {why}; to register: knnper fed register"
    )


def _adopt_node(node: RegisteredNode, used_names: Collection[str]) -> Registered:
    """Make the entry of a node that was registered with Flower's command."""
    name = node.name
    if not is_name(name) or name in used_names:
        name = f"node-{node.node_id}"
        message = "%s has no name of its own (Flower calls it %r)"
        logger.warning(message, name, node.name)
    return Registered(name, node.key_sha256, "flower")


@dataclass(frozen=True)
class ClientStatus:
    """A client, its key and its status in Flower."""

    name: str
    status: str
    key_sha256: str
    node_id: str | None


def list_clients(settings: ServerSettings) -> tuple[list[ClientStatus], list[str]]:
    """Return all clients, sorted by name, and the problems met."""
    keys, problems = AuthorizedFolder(settings.authorized).keys()
    names = {fingerprint(key): name for name, key in keys.items()}
    nodes: dict[str, RegisteredNode] = {}
    try:
        with control_port(settings) as control:
            nodes = {node.key_sha256: node for node in control.nodes()}
    except RunError as error:
        problems.append(f"{ONLY_FOLDER}: {error}")
    clients = [
        ClientStatus(name, AUTHORIZED, key, None)
        for key, name in names.items()
        if key not in nodes
    ]
    clients += [
        ClientStatus(
            names.get(key) or node.name or f"node-{node.node_id}",
            *(node.status, key, node.node_id),
        )
        for key, node in nodes.items()
        if key in names or node.status != UNREGISTERED
    ]
    return sorted(clients, key=lambda client: client.name), problems
