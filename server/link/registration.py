"""Brings Flower's registrations in line with the folder of authorized keys."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from knnper.config.errors import RunError
from knnper.config.names import is_name
from knnper.transport.credentials.node_keys import fingerprint
from server.link.authorized import AuthorizedFolder
from server.link.control import UNREGISTERED, Node
from server.link.roster_file import Registered, read_roster, write_roster

logger = logging.getLogger(__name__)


class Registry(Protocol):
    """What registration needs of Flower; see `server.link.control.ControlPort`."""

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
                "new key: knnper federation register",
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
