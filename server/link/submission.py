"""Runs on a server: submitted, looked at, stopped, through Flower's own command."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knnper.config.errors import RunError
from server.link.app_bundle import write_bundle
from server.link.commands import flower_command
from server.link.control import ControlPort, RunStatus
from server.link.flower_home import CONNECTION
from server.link.superlink import control_authority
from server.settings import ServerSettings

CONFIG_KEYS = frozenset(
    {
        "experiment",
        "document",
        "set",
        "output",
        "overwrite",
        "resume",
        "registry",
    }
)
"""Everything that a run configuration holds."""

_TIMEOUT_S = 120.0


def submit(settings: ServerSettings, config: Mapping[str, str | bool]) -> int:
    """Submit a run to the server on this machine; return its id.

    Parameters
    ----------
    settings
        The server.
    config
        The run configuration, every key of it.

    Raises
    ------
    RunError
        If the server cannot be reached or does not take it.
    """
    with tempfile.TemporaryDirectory(prefix="knnper-run-") as folder:
        write_bundle(Path(folder), config)
        document = _flwr(settings, ["run", folder, CONNECTION, "--format", "json"])
    run_id = document.get("run-id")
    if run_id is None:
        raise RunError(f"the server did not take the run: {_message(document)}")
    return int(run_id)


def status(settings: ServerSettings, run_id: int) -> RunStatus:
    """Return how a run is getting on.

    Raises
    ------
    RunError
        If the server cannot be reached, or does not know the run.
    """
    with ControlPort(settings.control_address, control_authority(settings)) as control:
        return control.run_status(run_id)


def last_words(settings: ServerSettings, run_id: int, num_lines: int = 12) -> str:
    """Return the end of what a run has written to its log."""
    arguments = ["log", str(run_id), CONNECTION, "--show"]
    text = _output_of(settings, arguments)
    return "\n".join(text.splitlines()[-num_lines:])


def _flwr(settings: ServerSettings, arguments: Sequence[str]) -> dict[str, Any]:
    output = _output_of(settings, arguments)
    try:
        document = json.loads(output[output.index("{") :])
    except ValueError as error:
        raise RunError(
            f"flwr {arguments[0]} did not answer as expected: {output.strip()}. Is "
            f"the server running? It is started by knnper server, and answers at "
            f"{settings.control}"
        ) from error
    if not document.get("success", True):
        raise RunError(f"flwr {arguments[0]} failed: {_message(document)}")
    return dict(document)


def _output_of(settings: ServerSettings, arguments: Sequence[str]) -> str:
    command = [str(flower_command("flwr")), *arguments]
    environment = {**os.environ, "FLWR_HOME": str(settings.flower_home)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"flwr {arguments[0]} did not end: {error}") from error
    return done.stdout or done.stderr


def _message(document: Mapping[str, Any]) -> str:
    return str(document.get("error-message") or document)
