"""Brings Flower's registrations in line with the folder of authorized keys."""

import contextlib
import logging
import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
)

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

UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class Node:
    """A SuperNode that Flower knows.

    Attributes
    ----------
    node_id
        Flower's number, as decimal text.
    name
        What it was registered as; may be empty.
    key_sha256
        Fingerprint of its public key.
    status
        ``registered``, ``online``, ``offline`` or ``unregistered``.
    """

    node_id: str
    name: str
    key_sha256: str
    status: str


@dataclass(frozen=True)
class RunStatus:
    """How Flower says that a run is getting on.

    Attributes
    ----------
    state
        ``pending``, ``starting``, ``running`` or ``finished``.
    outcome
        ``completed``, ``failed`` or ``stopped`` of a finished run, else empty.
    details
        What Flower says of it.
    """

    state: str
    outcome: str = ""
    details: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state == "finished"


class ControlPort:
    """A connection to the SuperLink's own port; close it, or use ``with``.

    Parameters
    ----------
    address
        Where it is.
    ca
        Certificate of the authority that the port's certificate is from; None
        without TLS.

    Raises
    ------
    RunError
        If there is no such certificate, as before the server's first start.
    """

    def __init__(self, address: Address, ca: Path | None) -> None:
        if ca is not None and not ca.exists():
            raise RunError(f"the server has never run: there is no {ca}; start it")
        self._address = address
        self._client = ControlHttpClient.from_server_address(
            str(address), ca is None, None if ca is None else ca.read_bytes(), []
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def nodes(self) -> list[Node]:
        """Return all nodes that were ever registered.

        Raises
        ------
        RunError
            If the port cannot be reached or refuses.
        """
        with self._telling("list the nodes"):
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [
            Node(str(one.node_id), one.name, _key_sha256(one.public_key), one.status)
            for one in found
        ]

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> str:
        """Register the client ``name``; return its node id.

        Raises
        ------
        RunError
            If Flower knows the key already, also if that was removed, or as `nodes`.
        """
        request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
        with self._telling(f"register {name}"):
            return str(self._client.RegisterNode(request).node_id)

    def unregister(self, node_id: str) -> None:
        """Take the node's registration away; it cannot be given back to its key.

        Raises
        ------
        RunError
            As `nodes`.
        """
        with self._telling(f"remove the node {node_id}"):
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=int(node_id)))

    def run_status(self, run_id: int) -> RunStatus:
        """Return how a run is getting on.

        Raises
        ------
        RunError
            If Flower does not know the run, or as `nodes`.
        """
        with self._telling(f"find the run {run_id}"):
            found = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
        if run_id not in found:
            raise RunError(
                f"the server knows no run {run_id}: its database may have been removed"
            )
        told = found[run_id].status
        return RunStatus(told.status, told.sub_status, told.details)

    def run_of_bundle(self, version: str) -> int | None:
        """Return the run of the bundle ``version``, if it is among the last 20.

        Raises
        ------
        RunError
            As `nodes`.
        """
        with self._telling("list the runs"):
            found = self._client.ListRuns(ListRunsRequest()).run_dict
        runs = (run_id for run_id, run in found.items() if run.fab_version == version)
        return next(runs, None)

    @contextlib.contextmanager
    def _telling(self, action: str) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            refused = FlowerError.from_json(error.response.text)
            reason = refused.message if refused else str(error)
            raise RunError(f"Flower did not {action}: {reason}") from error
        except httpx.HTTPError as error:
            raise RunError(
                f"Flower's control port {self._address} cannot be reached to {action} "
                f"({error}); does the server run on this machine?"
            ) from error


def _key_sha256(public_key: bytes) -> str:
    return fingerprint(bytes_to_public_key(public_key))


logger = logging.getLogger(__name__)


class Registry(Protocol):
    """What registration needs of Flower; see `ControlPort`."""

    def nodes(self) -> list[Node]:
        """Return all nodes that were ever registered."""

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> str:
        """Register a client; return its node id."""

    def unregister(self, node_id: str) -> None:
        """Take a node's registration away."""


def reconcile(
    folder: AuthorizedFolder,
    registry: Registry,
    roster_file: Path,
    *,
    by_key: bool = True,
) -> dict[str, Registered]:
    """Register who is new in ``folder``, remove who left it; write the roster.

    Nodes that were registered with Flower's own command stay, and are in the roster
    under the name given there. Without the roster of before, such a node cannot be
    told from a client whose key left the folder, and is removed like one.

    Parameters
    ----------
    folder
        The authorized keys.
    registry
        Flower.
    roster_file
        Where the clients are written.
    by_key
        Whether clients have to prove a key; else whoever comes is a client.

    Returns
    -------
    dict
        The roster: clients by node id.

    Raises
    ------
    RunError
        If Flower cannot be reached, or the folder is missing.
    """
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
    ledger = _Ledger(keys, counts, before, registry, adopts=adopts)
    for node in registry.nodes():
        ledger.see(node)
    ledger.register_new()
    if ledger.roster != before or not roster_file.exists():
        write_roster(roster_file, ledger.roster)
    return ledger.roster


class _Ledger:
    """Makes the new roster from the keys, the old roster and what Flower knows."""

    def __init__(
        self,
        keys: Mapping[str, ec.EllipticCurvePublicKey],
        counts: Mapping[str, int],
        before: Mapping[str, Registered],
        registry: Registry,
        *,
        adopts: bool,
    ) -> None:
        self._keys = keys
        self._counts = counts
        self._wanted = {fingerprint(key): name for name, key in keys.items()}
        self._before = before
        self._registry = registry
        self._adopts = adopts
        self._removed: set[str] = set()
        self.roster: dict[str, Registered] = {}

    def see(self, node: Node) -> None:
        """Keep ``node``, or take its registration away."""
        name = self._wanted.get(node.key_sha256)
        known = self._before.get(node.node_id)
        if node.status == UNREGISTERED:
            self._removed.add(node.key_sha256)
        elif name is not None:
            self._enter(node.node_id, name, node.key_sha256)
        elif known is not None and known.source == "folder":
            self._remove(node, f"removed {known.name}: its key is gone")
        elif known is not None or self._adopts:
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
        for name, key in self._keys.items():
            key_sha256 = fingerprint(key)
            if key_sha256 in self._removed:
                logger.warning(
                    "not registered: the key of %s (%s) was removed once and cannot "
                    "come back; make it another one",
                    name,
                    key_sha256,
                )
            elif key_sha256 not in known:
                node_id = self._registry.register(name, key)
                self._enter(node_id, name, key_sha256)
                logger.info("registered %s (%s)", name, key_sha256)

    def _enter(self, node_id: str, name: str, key_sha256: str) -> None:
        count = self._counts.get(name)
        self.roster[node_id] = Registered(name, key_sha256, "folder", count)

    def _remove(self, node: Node, why: str) -> None:
        self._registry.unregister(node.node_id)
        self._removed.add(node.key_sha256)
        logger.warning("%s (%s)", why, node.key_sha256)

    def _adopt(self, node: Node) -> None:
        """Keep a node that was registered with Flower's own command."""
        taken = {*self._keys, *(one.name for one in self.roster.values())}
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
    """One client.

    Attributes
    ----------
    name
        The client's.
    status
        ``authorized``, or as in `Node`.
    key_sha256
        Fingerprint of its key.
    node_id
        Flower's number; None if it is not registered.
    """

    name: str
    status: str
    key_sha256: str
    node_id: str | None

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Census:
    """All clients, sorted by name, and what could not be found out.

    Attributes
    ----------
    clients
        Everyone who may connect.
    problems
        Unreadable keys, a server that does not run.
    """

    clients: tuple[ClientStatus, ...]
    problems: tuple[str, ...]


def census(settings: ServerSettings) -> Census:
    """Return the clients by the folder of authorized keys and by Flower."""
    keys, problems = AuthorizedFolder(settings.authorized).keys()
    wanted = {fingerprint(key): name for name, key in keys.items()}
    try:
        nodes = _nodes(settings)
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


def _nodes(settings: ServerSettings) -> dict[str, Node]:
    with ControlPort(settings.control_address, control_authority(settings)) as control:
        return {node.key_sha256: node for node in control.nodes()}


def _status(name: str, key_sha256: str, node: Node | None) -> ClientStatus:
    if node is None:
        return ClientStatus(name, AUTHORIZED, key_sha256, None)
    return ClientStatus(name, node.status, key_sha256, node.node_id)
