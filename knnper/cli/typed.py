"""The command as the user typed it."""

import sys
from pathlib import Path


def typed_command() -> list[str]:
    """Return the command and its arguments, the program by its name alone."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
