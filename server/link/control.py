"""Flower's control port, as far as clients' registration needs it."""

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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

from knnper.config.address import Address
from knnper.config.errors import RunError
from knnper.transport.credentials.node_keys import fingerprint

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
