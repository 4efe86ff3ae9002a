"""Flower's commands, those that belong to this Python."""

import sys
from pathlib import Path

from knnper.config.errors import RunError


def commands_folder() -> Path:
    """Return the folder of the commands that came with this Python's packages."""
    return Path(sys.executable).parent


def flower_command(name: str) -> Path:
    """Return the path of one of Flower's commands.

    Raises
    ------
    RunError
        If it is not installed.
    """
    command = commands_folder() / name
    if not command.exists():
        raise RunError(f"there is no {command}; install flwr beside this program")
    return command
