"""From errors to messages and exit codes."""

import errno
from collections.abc import Mapping
from typing import Any

import click
import typer
from typer.core import TyperGroup

from knnper.cli.output import say
from knnper.config.errors import ConfigError, FolderTakenError, KnnPerError

RUN_FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_FREE_SPACE = "free space, then give the same command again"
_A_FOLDER = "expected a folder there; choose another path"
_ALLOWED = "expected to be allowed; change its permissions or choose another path"
_ADVICE: Mapping[int | None, str] = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EEXIST: _A_FOLDER,
    errno.ENOTDIR: _A_FOLDER,
    errno.EACCES: _ALLOWED,
    errno.EPERM: _ALLOWED,
    errno.EROFS: _ALLOWED,
    errno.ENOENT: "expected it to be there; check the path or choose another",
}


class ErrorReportingGroup(TyperGroup):
    """Commands whose expected errors are a message, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises
        ------
        typer.Exit
            With 2 for a wrong configuration and a folder that is taken, 1 for any other
            expected error, as one of the system's, and 130 when the user interrupts.
        """
        try:
            return super().invoke(ctx)
        except (ConfigError, FolderTakenError) as error:
            say(f"Error: {error}")
            raise typer.Exit(WRONG_USAGE) from error
        except KnnPerError as error:
            say(f"Error: {error}")
            raise typer.Exit(RUN_FAILED) from error
        except BrokenPipeError:
            # Who reads the output has enough of it; click ends in silence then.
            raise
        except OSError as error:
            say(f"Error: {system_error(error)}")
            raise typer.Exit(RUN_FAILED) from error
        except KeyboardInterrupt as error:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from error


def system_error(error: OSError) -> str:
    """Return what is wrong with which path, and how to mend it."""
    reason = error.strerror or str(error) or type(error).__name__
    where = "" if error.filename is None else f"{error.filename}: "
    advice = _ADVICE.get(error.errno)
    return f"{where}{reason}; {advice}" if advice else f"{where}{reason}"
