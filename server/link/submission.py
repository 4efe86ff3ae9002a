"""Submit runs to the server with Flower's own command, and show how they ended."""

import importlib.metadata
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from knnper.errors import RunError
from knnper.files import parse_json, write_atomically
from knnper.server.link.registration import RunStatus, control_port
from knnper.server.link.superlink import CONNECTION, flower_command
from knnper.server.settings import ServerSettings

# What our ServerApp logs before an error of this project ends it.
RUN_ENDED = "the run has ended"
# How long the server may take to accept a run: a busy machine needs minutes.
PATIENCE_S = 900.0

_TIMEOUT_S = 120.0
_MODULE = "installed"
_CODE = '''"""The ServerApp and ClientApp that are installed on each machine."""

from {apps} import client_app
from {apps} import server_app

__all__ = ["client_app", "server_app"]
'''
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FLOWERS_PREFIX = "ServerApp failed with exception: "
_FLOWERS_EPILOGUE = "Exit Code:"  # precedes a link to a page without further details
_NUM_LINES = 12


def write_bundle(folder: Path, config: Mapping[str, str | bool], apps: str) -> None:
    """Write the Flower app of a run into an empty folder.

    Parameters
    ----------
    config
        The run configuration.
    apps
        Installed module with the attributes ``server_app`` and ``client_app``.
    """
    project: dict[str, Any] = {
        "name": "knnper-run",
        "version": importlib.metadata.version("knnper"),
        "description": "A run of the knnper that is installed on each machine",
        "license": "Apache-2.0",
        # The machines use what they have installed; nothing is fetched for a run.
        "dependencies": [],
    }
    components = {
        "serverapp": f"{_MODULE}:server_app",
        "clientapp": f"{_MODULE}:client_app",
    }
    app = {"publisher": "knnper", "components": components, "config": dict(config)}
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    write_atomically(folder / "pyproject.toml", text)
    write_atomically(folder / f"{_MODULE}.py", _CODE.format(apps=apps))


def submit(
    settings: ServerSettings, config: Mapping[str, str | bool], apps: str
) -> int:
    """Submit a run to the server on this machine, and return its id.

    ``config`` and ``apps`` are those of `write_bundle`.
    """
    with tempfile.TemporaryDirectory(prefix="knnper-run-") as folder:
        write_bundle(Path(folder), config, apps)
        answer = _run_flwr(settings, ["run", folder, CONNECTION, "--format", "json"])
    run_id = answer.get("run-id")
    if run_id is None:
        raise RunError(f"the server did not take the run: {_message(answer)}")
    return int(run_id)


def status(settings: ServerSettings, run_id: int) -> RunStatus:
    """Ask the server for the state of a run."""
    with control_port(settings) as control:
        return control.run_status(run_id)


def why_ended(settings: ServerSettings, run_id: int) -> str:
    """Return why a run ended: in a sentence, or with the end of its log."""
    ended = status(settings, run_id)
    reason = ended.details.removeprefix(_FLOWERS_PREFIX)
    outcome = f"{ended.outcome} {reason}".strip()
    try:
        lines = _log_lines(settings, run_id)
    except RunError as error:
        return f"{outcome}; its log cannot be shown: {error}"
    if reason and any(RUN_ENDED in line for line in lines):
        return reason
    return "\n".join([outcome, *lines[-_NUM_LINES:]])


def _log_lines(settings: ServerSettings, run_id: int) -> list[str]:
    """Return the log of a run without colours, blank lines and Flower's epilogue."""
    text = _output_of(settings, ["log", str(run_id), CONNECTION, "--show"], _TIMEOUT_S)
    lines = _TERMINAL_CODES.sub("", text).splitlines()
    shown = itertools.takewhile(lambda line: _FLOWERS_EPILOGUE not in line, lines)
    return [line for line in shown if line.strip()]


def _run_flwr(settings: ServerSettings, arguments: Sequence[str]) -> dict[str, Any]:
    """Run Flower's command, and return the JSON that it prints."""
    output = _output_of(settings, arguments, PATIENCE_S)
    try:
        document = parse_json(output[output.index("{") :])
    except ValueError as error:
        raise RunError(
            f"flwr {arguments[0]} did not answer as expected: {_in_one_line(output)}. "
            f"Is the server running (knnper fed server), at {settings.control}?"
        ) from error
    if not document.get("success", True):
        raise RunError(f"flwr {arguments[0]} failed: {_message(document)}")
    return dict(document)


def _output_of(
    settings: ServerSettings, arguments: Sequence[str], timeout_s: float
) -> str:
    try:
        completed = subprocess.run(
            [str(flower_command("flwr")), *arguments],
            env={**os.environ, "FLWR_HOME": str(settings.flower_home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"Flower's command flwr {arguments[0]} did not end within {timeout_s:g} s, "
            "and the server may have done what it asked for. Before you repeat it, "
            f"look at the runs: FLWR_HOME={settings.flower_home} flwr list {CONNECTION}"
        ) from error
    except OSError as error:
        raise RunError(f"flwr {arguments[0]} cannot be run: {error}") from error
    return completed.stdout or completed.stderr


def _message(document: Mapping[str, Any]) -> str:
    return _in_one_line(str(document.get("error-message") or document))


def _in_one_line(text: str) -> str:
    return " ".join(_TERMINAL_CODES.sub("", text).split())
