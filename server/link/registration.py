"""Brings Flower's registrations in line with the folder of authorized keys."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

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
from knnper.experiment import is_name
from knnper.server.link.authorized import (
    AuthorizedFolder,
    Registered,
    read_roster,
    write_roster,
)
from knnper.server.link.superlink import control_authority
from knnper.server.settings import ServerSettings
from knnper.transport.credentials import Address, fingerprint
from knnper.transport.flower_protocol import (
    CONTROL,
    FlowerError,
    http_client,
    post,
    public_pem,
    read_public_key,
)

UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class Node:
    """A SuperNode that Flower knows."""

    node_id: str
    name: str
    key_sha256: str
    status: str


@dataclass(frozen=True)
class RunStatus:
    """How Flower says that a run is getting on."""

    state: str
    outcome: str = ""
    details: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state == "finished"


class ControlPort:
    """A connection to the SuperLink's own port, for ``with``."""

    def __init__(self, address: Address, ca: Path | None) -> None:
        if ca is not None and not ca.exists():
            raise RunError(f"the server has never run: there is no {ca}; start it")
        self._address = address
        self._client = http_client(str(address), ca, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def nodes(self) -> list[Node]:
        """Return all nodes that were ever registered."""
        told = self._asked("list the nodes", "list-nodes", ListNodesRequest())
        return [
            Node(str(one.node_id), one.name, _key_sha256(one.public_key), one.status)
            for one in ListNodesResponse.FromString(told).nodes_info
        ]

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> str:
        """Register the client ``name``; return its node id."""
        request = RegisterNodeRequest(public_key=public_pem(key), name=name)
        told = self._asked(f"register {name}", "register-node", request)
        return str(RegisterNodeResponse.FromString(told).node_id)

    def unregister(self, node_id: str) -> None:
        """Take the node's registration away; it cannot be given back to its key."""
        request = UnregisterNodeRequest(node_id=int(node_id))
        self._asked(f"remove the node {node_id}", "unregister-node", request)

    def run_status(self, run_id: int) -> RunStatus:
        """Return how a run is getting on."""
        request = ListRunsRequest(run_id=run_id)
        told = self._asked(f"find the run {run_id}", "list-runs", request)
        found = ListRunsResponse.FromString(told).run_dict
        if run_id not in found:
            raise RunError(
                f"the server knows no run {run_id}: its database may have been removed"
            )
        status = found[run_id].status
        return RunStatus(status.status, status.sub_status, status.details)

    def run_of_bundle(self, version: str) -> int | None:
        """Return the run of the bundle ``version``, if it is among the last 20."""
        told = self._asked("list the runs", "list-runs", ListRunsRequest())
        found = ListRunsResponse.FromString(told).run_dict
        runs = (run_id for run_id, run in found.items() if run.fab_version == version)
        return next(runs, None)

    def _asked(self, action: str, path: str, request: Message) -> bytes:
        try:
            answer = post(self._client, CONTROL + path, request)
        except httpx.HTTPError as error:
            raise RunError(
                f"Flower's control port {self._address} cannot be reached to {action} "
                f"({error}); does the server run on this machine?"
            ) from error
        if answer.is_success:
            return answer.content
        why = FlowerError.of(answer.text).detail or f"HTTP {answer.status_code}"
        raise RunError(f"Flower did not {action}: {why}")


def _key_sha256(public_key: bytes) -> str:
    key = read_public_key(public_key)
    return "" if key is None else fingerprint(key)


logger = logging.getLogger(__name__)


def reconcile(
    folder: AuthorizedFolder,
    registry: ControlPort,
    roster_file: Path,
    *,
    by_key: bool = True,
) -> dict[str, Registered]:
    """Register who is new in ``folder``, remove who left it; write the roster."""
    if not folder.path.is_dir():
        raise RunError(
            f"there is no folder {folder.path}; registrations stay as they are"
        )
    before = read_roster(roster_file)
    keys, problems = folder.keys()
    for problem in problems:
        logger.warning("not registered: %s", problem)
    counts, problems = folder.counts()
    for problem in problems:
        logger.warning("not fixed: %s", problem)
    adopts = roster_file.exists() or not by_key
    ledger = _Ledger(keys, counts, before, registry, adopts)
    for node in registry.nodes():
        ledger.see(node)
    ledger.register_new()
    if ledger.roster != before or not roster_file.exists():
        write_roster(roster_file, ledger.roster)
    return ledger.roster


@dataclass
class _Ledger:
    """Makes the new roster from the keys, the old roster and what Flower knows."""

    keys: Mapping[str, ec.EllipticCurvePublicKey]
    counts: Mapping[str, int]
    before: Mapping[str, Registered]
    registry: ControlPort
    adopts: bool
    removed: set[str] = field(default_factory=set)
    roster: dict[str, Registered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = {fingerprint(key): name for name, key in self.keys.items()}

    def see(self, node: Node) -> None:
        """Keep ``node``, or take its registration away."""
        name = self.wanted.get(node.key_sha256)
        known = self.before.get(node.node_id)
        if node.status == UNREGISTERED:
            self.removed.add(node.key_sha256)
        elif name is not None:
            self._enter(node.node_id, name, node.key_sha256)
        elif known is not None and known.source == "folder":
            self._remove(node, f"removed {known.name}: its key is gone")
        elif known is not None or self.adopts:
            self._adopt(node)
        else:
            self._remove(
                node,
                f"removed {node.name or node.node_id}: it has no key in the folder, "
                "and no roster tells how it was registered. To let it in, make it a "
                "new key: knnper fed register",
            )

    def register_new(self) -> None:
        """Register the keys that Flower does not know."""
        known = {one.key_sha256 for one in self.roster.values()}
        for name, key in self.keys.items():
            key_sha256 = fingerprint(key)
            if key_sha256 in self.removed:
                logger.warning(
                    "not registered: the key of %s (%s) was removed once and cannot "
                    "come back; make it another one",
                    name,
                    key_sha256,
                )
            elif key_sha256 not in known:
                node_id = self.registry.register(name, key)
                self._enter(node_id, name, key_sha256)
                logger.info("registered %s (%s)", name, key_sha256)

    def _enter(self, node_id: str, name: str, key_sha256: str) -> None:
        count = self.counts.get(name)
        self.roster[node_id] = Registered(name, key_sha256, "folder", count)

    def _remove(self, node: Node, why: str) -> None:
        self.registry.unregister(node.node_id)
        self.removed.add(node.key_sha256)
        logger.warning("%s (%s)", why, node.key_sha256)

    def _adopt(self, node: Node) -> None:
        """Keep a node that was registered with Flower's own command."""
        taken = {*self.keys, *(one.name for one in self.roster.values())}
        name = node.name
        if not is_name(name) or name in taken:
            name = f"node-{node.node_id}"
            logger.warning(
                "%s has no name of its own (Flower calls it %r)", name, node.name
            )
        self.roster[node.node_id] = Registered(name, node.key_sha256, "flower")


AUTHORIZED = "authorized"
"""Status of a client that the server has not registered (yet)."""


@dataclass(frozen=True)
class ClientStatus:
    """One client."""

    name: str
    status: str
    key_sha256: str
    node_id: str | None

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Census:
    """All clients, sorted by name, and what could not be found out."""

    clients: tuple[ClientStatus, ...]
    problems: tuple[str, ...]


def census(settings: ServerSettings) -> Census:
    """Return the clients by the folder of authorized keys and by Flower."""
    keys, problems = AuthorizedFolder(settings.authorized).keys()
    wanted = {fingerprint(key): name for name, key in keys.items()}
    try:
        port = ControlPort(settings.control_address, control_authority(settings))
        with port as control:
            nodes = {node.key_sha256: node for node in control.nodes()}
    except RunError as error:
        nodes = {}
        problems.append(f"Only what the folder says: {error}")
    clients = [_status(name, key, nodes.get(key)) for key, name in wanted.items()]
    clients += [
        _status(node.name or f"node-{node.node_id}", key, node)
        for key, node in nodes.items()
        if key not in wanted and node.status != UNREGISTERED
    ]
    ordered = sorted(clients, key=lambda client: client.name)
    return Census(tuple(ordered), tuple(problems))


def _status(name: str, key_sha256: str, node: Node | None) -> ClientStatus:
    if node is None:
        return ClientStatus(name, AUTHORIZED, key_sha256, None)
    return ClientStatus(name, node.status, key_sha256, node.node_id)
