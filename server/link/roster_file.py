"""The file that tells which node of Flower's is which client."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from knnper.config.errors import RunError
from knnper.durable_files import write_atomically

_FORMAT = 1


@dataclass(frozen=True)
class Registered:
    """A client that may connect.

    Attributes
    ----------
    name
        What it is called; unique.
    key_sha256
        Fingerprint of its key; unique.
    source
        ``folder`` if it is there because of a file among the authorized keys, which
        can be taken away again; ``flower`` if it was registered with Flower's command.
    num_train
        On how many examples it trains, where the operator fixed that.
    """

    name: str
    key_sha256: str
    source: Literal["folder", "flower"]
    num_train: int | None = None


def write_roster(path: Path, nodes: Mapping[str, Registered]) -> None:
    """Write the clients, by node id, to the file ``path``."""
    entries = {node_id: asdict(one) for node_id, one in sorted(nodes.items())}
    text = json.dumps({"format": _FORMAT, "nodes": entries}, indent=2)
    write_atomically(path, f"{text}\n")


def read_roster(path: Path) -> dict[str, Registered]:
    """Return the clients by node id; none without a file.

    Raises
    ------
    RunError
        If the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r}, expected {_FORMAT}")
        return {
            node_id: Registered(**entry) for node_id, entry in document["nodes"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); put a copy of it back, or remove it: the "
            "running server writes it anew, and drops clients that were registered "
            "with Flower's command instead of a key in the folder"
        ) from error
