"""Runs on a server: submitted, looked at, stopped, through Flower's own command."""

import importlib.metadata
import itertools
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from knnper.errors import RunError
from knnper.files import parse_json, write_atomically
from knnper.server.link.registration import RunStatus, control_port
from knnper.server.link.superlink import CONNECTION, announce_run, flower_command
from knnper.server.settings import ServerSettings

_MODULE = "installed"
_CODE = '''"""Nothing of its own: the installed server and client."""

from knnper.cli.flower_apps import client_app
from knnper.cli.flower_apps import server_app

__all__ = ["client_app", "server_app"]
'''


def write_bundle(folder: Path, config: Mapping[str, str | bool]) -> str:
    """Write the bundle of a run into an empty folder; return its version."""
    version = f"{importlib.metadata.version('knnper')}+{secrets.token_hex(8)}"
    about = "A run of the knnper that is installed on each machine"
    project: dict[str, Any] = {
        "name": "knnper-run",
        "version": version,
        "description": about,
    }
    # What the machines have is what is used; nothing is fetched for a run.
    project |= {"license": "Apache-2.0", "dependencies": []}
    apps = {"serverapp": "server_app", "clientapp": "client_app"}
    components = {kind: f"{_MODULE}:{app}" for kind, app in apps.items()}
    app = {"publisher": "knnper", "components": components, "config": dict(config)}
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    write_atomically(folder / "pyproject.toml", text)
    write_atomically(folder / f"{_MODULE}.py", _CODE)
    return version


# How long the server may take to take a run: a busy machine needs minutes.
PATIENCE_S = 900.0
_TIMEOUT_S = 120.0
_LATE_S = 30.0
_LOOK_S = 1.0


class _NoEndError(RunError):
    """Flower's command did not end in time."""


def submit(settings: ServerSettings, config: Mapping[str, str | bool]) -> int:
    """Submit a run to the server on this machine; return its id."""
    with tempfile.TemporaryDirectory(prefix="knnper-run-") as folder:
        version = write_bundle(Path(folder), config)
        try:
            document = _flwr(settings, ["run", folder, CONNECTION, "--format", "json"])
        except RunError as error:
            return _taken_anyway(settings, version, error)
    run_id = document.get("run-id")
    if run_id is None:
        raise RunError(f"the server did not take the run: {_message(document)}")
    announce_run(settings.state)
    return int(run_id)


def status(settings: ServerSettings, run_id: int) -> RunStatus:
    """Return how a run is getting on."""
    with control_port(settings) as control:
        return control.run_status(run_id)


# What a ServerApp of ours logs before an error of this project ends it.
RUN_ENDED = "the run has ended"
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FLOWERS_PREFIX = "ServerApp failed with exception: "
_FLOWERS_EPILOGUE = "Exit Code:"  # of each failure, and a page that says no more
_NUM_LINES = 12


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
    """Return what a run has written to its log, without what steers a terminal."""
    text = _output_of(settings, ["log", str(run_id), CONNECTION, "--show"])
    lines = _TERMINAL_CODES.sub("", text).splitlines()
    shown = itertools.takewhile(lambda line: _FLOWERS_EPILOGUE not in line, lines)
    return [line for line in shown if line.strip()]


def _taken_anyway(settings: ServerSettings, version: str, error: RunError) -> int:
    """Return the run of a bundle whose submission failed, after the server took it."""
    try:
        run_id = _late_run(settings, version)
    except RunError as unknown:
        if not isinstance(error, _NoEndError):
            raise error from unknown
        look = f"FLWR_HOME={settings.flower_home} flwr list {CONNECTION}"
        raise RunError(
            f"{error}. Whether the server has taken the run is not known: {unknown}. "
            f"Before you submit it again, look for it: {look}"
        ) from error
    if run_id is not None:
        return run_id
    why = "The server has not taken the run: submit it again"
    raise RunError(f"{error}. {why}") from error


def _late_run(settings: ServerSettings, version: str) -> int | None:
    """Return the run of a bundle; None if the server does not take it for a while."""
    end = time.monotonic() + _LATE_S
    while True:
        with control_port(settings) as control:
            found = control.run_of_bundle(version)
        if found is not None or time.monotonic() >= end:
            return found
        time.sleep(_LOOK_S)


def _flwr(settings: ServerSettings, arguments: Sequence[str]) -> dict[str, Any]:
    output = _output_of(settings, arguments, PATIENCE_S)
    try:
        document = parse_json(output[output.index("{") :])
    except ValueError as error:
        where = f"Is the server running (knnper fed server), at {settings.control}?"
        said = f"did not answer as expected: {_in_one_line(output)}"
        raise RunError(f"flwr {arguments[0]} {said}. {where}") from error
    if not document.get("success", True):
        raise RunError(f"flwr {arguments[0]} failed: {_message(document)}")
    return dict(document)


def _output_of(
    settings: ServerSettings, arguments: Sequence[str], timeout_s: float = _TIMEOUT_S
) -> str:
    try:
        done = subprocess.run(
            [str(flower_command("flwr")), *arguments],
            env={**os.environ, "FLWR_HOME": str(settings.flower_home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise _NoEndError(
            f"Flower's command flwr {arguments[0]} did not end within {timeout_s:g} s"
        ) from error
    except OSError as error:
        raise RunError(f"flwr {arguments[0]} cannot be run: {error}") from error
    return done.stdout or done.stderr


def _message(document: Mapping[str, Any]) -> str:
    return _in_one_line(str(document.get("error-message") or document))


def _in_one_line(text: str) -> str:
    return " ".join(_TERMINAL_CODES.sub("", text).split())
