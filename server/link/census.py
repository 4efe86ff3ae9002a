"""Who may connect, who is registered and who is online."""

from dataclasses import asdict, dataclass
from typing import Any

from knnper.config.errors import RunError
from knnper.transport.credentials.node_keys import fingerprint
from server.link.authorized import AuthorizedFolder
from server.link.control import UNREGISTERED, ControlPort, Node
from server.link.superlink import control_authority
from server.settings import ServerSettings

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
        ``authorized``, or as in `server.link.control.Node`.
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
