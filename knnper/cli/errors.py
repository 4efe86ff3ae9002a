"""From errors to messages and exit codes."""

from typing import Any

import click
import typer
from typer.core import TyperGroup

from knnper.cli.output import say
from knnper.config.errors import ConfigError, FolderTakenError, KnnPerError

RUN_FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class ErrorReportingGroup(TyperGroup):
    """Commands whose expected errors are a message, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises
        ------
        typer.Exit
            With 2 for a wrong configuration and a folder that is taken, 1 for any other
            expected error, and 130 when the user interrupts.
        """
        try:
            return super().invoke(ctx)
        except (ConfigError, FolderTakenError) as error:
            say(f"Error: {error}")
            raise typer.Exit(WRONG_USAGE) from error
        except KnnPerError as error:
            say(f"Error: {error}")
            raise typer.Exit(RUN_FAILED) from error
        except KeyboardInterrupt as error:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from error
