"""Arguments and options that several of the commands take."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.output import say

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
]
Output = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Where numbers and pictures go; a figure that was left there goes on.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random choice.")]


def say_where(output: Path) -> None:
    """Say where to find what was made."""
    say(f"Numbers and pictures are in {output}")
