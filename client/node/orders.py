"""What the node tells its runner when it starts it."""

import json
from dataclasses import asdict, dataclass

READY = b"ready\n"
"""What a runner writes once everything is loaded."""

CLIENT_APP = "knnper.apps.client:client_app"


@dataclass(frozen=True)
class Orders:
    """How the runner reaches the node and what it runs.

    Attributes
    ----------
    address
        ``HOST:PORT`` of the node's Runtime API, on this machine.
    secret
        Shared with that API, as hexadecimal digits: nobody else gets a task from it.
    parent
        Process id of the node.
    app
        ``MODULE:NAME`` of the installed ClientApp that plays every message.
    allow_app_code
        Run the ClientApp that comes with a run instead, as Flower does. Then whoever
        may submit runs may run any code here.
    verbose
        Whether what Flower says of every message is logged, too.
    """

    address: str
    secret: str
    parent: int
    app: str = CLIENT_APP
    allow_app_code: bool = False
    verbose: bool = False

    def as_line(self) -> bytes:
        """Return the orders as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "Orders":
        """Return the orders that `as_line` wrote."""
        return Orders(**json.loads(line))
