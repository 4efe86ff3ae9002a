"""Flower's own ``flower-supernode``, which runs the code that comes with a run."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from knnper import lifeline
from knnper.client.refusal import Refusal

LOOPBACK = "127.0.0.1"
_TERM_S = 6.0  # Flower's own end takes half of it
_CHECK_S = 0.5


def serve_plainly(
    server_address: str,
    ca: Path | None,
    key: Path | None,
    config: Path,
    home: Path,
    check: Callable[[], None],
) -> NoReturn:
    """Run Flower's own node until it ends; ``check`` is called every half second.

    Parameters
    ----------
    config
        The client's file, which the node's configuration names.
    home
        FLWR_HOME of the node.

    Raises
    ------
    Refusal
        When the node has ended.
    """
    trust = ["--insecure"] if ca is None else ["--root-certificates", ca]
    proof = [] if key is None else ["--auth-supernode-private-key", key]
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    folder = Path(sys.executable).parent
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", lifeline.__file__, str(os.getpid())),
            folder / "flower-supernode",
            *("--superlink", server_address, *trust, *proof),
            *("--host", LOOPBACK, "--port", str(port)),
            *("--node-config", f"config={json.dumps(str(config))}"),
        ],
        env={
            **os.environ,
            "PATH": os.pathsep.join((str(folder), os.environ.get("PATH", os.defpath))),
            "FLWR_HOME": str(home),
        },
    )
    try:
        while process.poll() is None:
            check()
            time.sleep(_CHECK_S)
        raise Refusal(f"flower-supernode ended with status {process.returncode}")
    finally:
        process.terminate()
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
