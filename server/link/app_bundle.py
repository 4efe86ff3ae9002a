"""The bundle that Flower takes a run from: it holds settings, and no code of its own.

Server and clients run what is installed on their machines. Flower wants a folder with a
project in it, so here is the smallest one.
"""

import importlib.metadata
import secrets
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from knnper.durable_files import write_atomically

_MODULE = "installed"
_CODE = '''"""Nothing of its own: the installed server and client."""

from knnper.apps.client import client_app
from knnper.apps.server import server_app

__all__ = ["client_app", "server_app"]
'''


def write_bundle(folder: Path, config: Mapping[str, str | bool]) -> str:
    """Write the bundle of a run into an empty folder; return its version.

    No two bundles have the same one, so that a run can be told by it.

    Parameters
    ----------
    folder
        Where; must exist.
    config
        Every key of the run configuration with its value.
    """
    version = f"{importlib.metadata.version('knnper')}+{secrets.token_hex(8)}"
    project = {
        "project": {
            "name": "knnper-run",
            "version": version,
            "description": "A run of the knnper that is installed on each machine",
            "license": "Apache-2.0",
            # What the machines have is what is used; nothing is fetched for a run.
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "knnper",
                    "components": {
                        "serverapp": f"{_MODULE}:server_app",
                        "clientapp": f"{_MODULE}:client_app",
                    },
                    "config": dict(config),
                }
            }
        },
    }
    write_atomically(folder / "pyproject.toml", tomli_w.dumps(project))
    write_atomically(folder / f"{_MODULE}.py", _CODE)
    return version
