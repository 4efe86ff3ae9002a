"""The SuperNode's Runtime API, from which the runner gets messages, on this machine."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

_LOOPBACK = "127.0.0.1"
_STOP_S = 0.5


@contextlib.contextmanager
def runtime_api(state: NodeStateFactory, secret: bytes) -> Iterator[str]:
    """Answer the runner in a thread, at a free port.

    Parameters
    ----------
    state
        Shared with the SuperNode.
    secret
        Who does not know it gets no task.

    Yields
    ------
    str
        ``HOST:PORT``.
    """
    app = create_app(state_factory=state, superexec_auth_secret=secret)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.create_server((_LOOPBACK, 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"{_LOOPBACK}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_STOP_S)
