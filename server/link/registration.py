"""Bring Flower's registrations in line with the folder of authorized keys."""

import logging
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

from knnper.audit_log import AuditLog
from knnper.errors import RunError
from knnper.server.link.authorized import (
    AuthorizedFolder,
    Registered,
    read_roster,
    write_roster,
)
from knnper.server.link.superlink import control_authority
from knnper.server.settings import ServerSettings
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
    insecure: bool = False,
) -> dict[str, Registered]:
    """Register the clients of ``folder``, unregister other nodes, write the roster.

    Registrations are recorded in the audit log beside the roster.
    Without authentication (``insecure``) nodes have no key, and all belong to it.
    """
    if not folder.path.is_dir():
        outcome = "registrations stay as they are"
        raise RunError(f"there is no folder {folder.path}; {outcome}")
    before = read_roster(roster_file)
    audit_log = AuditLog.of(roster_file.parent)
    keys, key_problems = folder.keys()
    counts, count_problems = folder.counts()
    for problem in key_problems:
        logger.warning("not registered: %s", problem)
    for problem in count_problems:
        logger.warning("not fixed: %s", problem)
    names = {fingerprint(key): name for name, key in keys.items()}
    roster: dict[str, Registered] = {}
    removed: set[str] = set()
    for node in registry.nodes():
        key_sha256, name = node.key_sha256, names.get(node.key_sha256)
        if node.status == UNREGISTERED:
            removed.add(key_sha256)
        elif name is not None:
            roster[node.node_id] = Registered(name, key_sha256, counts.get(name))
        elif insecure:
            roster[node.node_id] = Registered(f"node-{node.node_id}", key_sha256)
        else:
            title = node.name or node.node_id
            audit_log.append("revoke_client", client=title, key=key_sha256)
            registry.unregister(node.node_id)
            removed.add(key_sha256)
            logger.warning(
                "removed %s: its key is not in the folder (%s)", title, key_sha256
            )
    registered = {client.key_sha256 for client in roster.values()}
    for key_sha256, name in names.items():
        if key_sha256 in removed:
            message = (
                "not registered: the key %s (%s) was removed once; make it another one"
            )
            logger.warning(message, name, key_sha256)
        elif key_sha256 not in registered:
            audit_log.append("register_client", client=name, key=key_sha256)
            node_id = registry.register(name, keys[name])
            roster[node_id] = Registered(name, key_sha256, counts.get(name))
            logger.info("registered %s (%s)", name, key_sha256)
    if roster != before or not roster_file.exists():
        write_roster(roster_file, roster)
    return roster


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
