"""Flower's own configuration, so that its commands reach this server."""

import json
from pathlib import Path

from knnper.config.address import Address
from knnper.durable_files import write_atomically

CONNECTION = "federation"
"""What Flower's commands call this server: ``flwr list federation``."""


def write_connection(home: Path, control: Address, ca: Path | None) -> None:
    """Write ``config.toml`` into ``home``, which is ``FLWR_HOME`` of the operator.

    Parameters
    ----------
    home
        The folder; made if there is none.
    control
        Flower's own port.
    ca
        Certificate of the authority of that port; None without TLS.
    """
    trust = (
        "insecure = true"
        if ca is None
        else f"root-certificates = {json.dumps(str(ca))}"
    )
    home.mkdir(parents=True, exist_ok=True)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f"address = {json.dumps(str(control))}\n{trust}\n"
    )
    write_atomically(home / "config.toml", text)
