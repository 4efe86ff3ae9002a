"""The client's key, and whether the server knows it."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from client.doctor.state import did_not_leave
from client.node.lock import holder
from knnper.config.errors import CredentialError
from knnper.transport.credentials.files import permission_problem
from knnper.transport.credentials.node_keys import fingerprint, read_node_key
from knnper.transport.diagnosis.finding import Finding, fine, problem, warning
from knnper.transport.diagnosis.standing import (
    IMPOSSIBLE_PAUSE_S,
    Standing,
    standing_in,
)

_FORGOTTEN_S = 60.0
"""After two missed signs of life, 30 s apart, Flower takes a node for gone."""
_LONGEST_QUOTE = 200


@dataclass(frozen=True)
class Credentials:
    """A client's name and key, and the server that should know them.

    Attributes
    ----------
    name
        The client's.
    key
        Its private key.
    server, ca
        ``HOST:PORT``, and the authority that the server must be signed by.
    state
        The client's state folder.
    """

    name: str
    key: Path
    server: str
    ca: Path
    state: Path

    def key_is_readable(self) -> Finding:
        """Look at the key's file."""
        try:
            key = read_node_key(self.key)
        except CredentialError as error:
            return problem(
                str(error),
                "bring back the key that the operator sent, or correct `key`; a new "
                "key has to be registered: knnper federation register SERVER.yaml "
                f"{self.name} {self.key.name}.pub",
            )
        exposed = permission_problem(self.key)
        if exposed is not None:
            found, _, advice = exposed.partition("; ")
            return warning(found, advice, "mode 0600")
        return fine(f"{fingerprint(key.public_key())} ({self.key})")

    def key_is_registered(self) -> Finding:
        """Ask the server whether it knows the key; see `standing` for how."""
        key = read_node_key(self.key)
        response = self._asked(key)
        if response is None:
            return problem(
                "the server did not answer", "try again, and look into the server's log"
            )
        code, told = _parts(response.text)
        if code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return self._unknown(key)
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            return problem(
                f"the server does not take the key's signature: {told}",
                "set the clocks of both machines; if they agree, have the operator "
                "register this key anew",
            )
        if code != ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return problem(
                f"the server's answer cannot be understood (HTTP status "
                f"{response.status_code}): {told}",
                "install the same versions on both sides",
            )
        return self._standing(standing_in(response.text))

    def _asked(self, key: ec.EllipticCurvePrivateKey) -> httpx.Response | None:
        public = key.public_key()
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(public),
            heartbeat_interval=IMPOSSIBLE_PAUSE_S,
        )
        signing = NodeAuthHttpInterceptor(key, public)
        certificate = self.ca.read_bytes()
        with FleetHttpClient.from_server_address(
            self.server, False, certificate, interceptors=[signing]
        ) as client:
            try:
                client.ActivateNode(request)
            except httpx.HTTPStatusError as error:
                return error.response
            except httpx.HTTPError:
                pass
        return None

    def _unknown(self, key: ec.EllipticCurvePrivateKey) -> Finding:
        return problem(
            f"the key {fingerprint(key.public_key())} is not registered with the "
            "server, or no longer",
            f"send {self.key.name}.pub to the federation's operator, who runs: knnper "
            f"federation register SERVER.yaml {self.name} {self.key.name}.pub. A key "
            "that was removed cannot come back: make a new one",
        )

    def _standing(self, standing: Standing | None) -> Finding:
        here = holder(self.state)
        if standing is None or standing.name is None:
            return fine("the server knows the key; it tells no name")
        if standing.name != self.name:
            return problem(
                f"the key is registered as {standing.name}, and `name` is {self.name}",
                f"set `name: {standing.name}`, or use the key of {self.name}: a name "
                "is one key",
            )
        if here is not None:
            return fine(f"registered as {self.name}, and its node runs ({here})")
        if standing.idle_s is not None and standing.idle_s < _FORGOTTEN_S:
            return self._online(standing.idle_s)
        return fine(f"registered as {self.name}")

    def _online(self, idle_s: float) -> Finding:
        heard = f"{idle_s:.0f} s ago the server heard of a node with this key"
        if did_not_leave(self.state):
            return warning(
                f"{heard}, maybe the one of {self.state}, which did not leave in order",
                "start it again: knnper client; it is let in within a minute",
            )
        return problem(
            f"{heard}, which does not run from {self.state}",
            "stop the other node: a name and its key are one client's, and a second "
            "node is refused while the first is there. For another client, make "
            "another key: knnper federation add-client",
            "no other node with this client's name and key",
        )


def _parts(body: str) -> tuple[int, str]:
    """Return Flower's code and what it, or the gateway, has to say."""
    try:
        error = json.loads(body)
        return int(error.get("code", 0)), str(error.get("extra") or error["detail"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0, body[:_LONGEST_QUOTE]
