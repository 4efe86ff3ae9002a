"""Arguments and options that several of the commands take."""

from pathlib import Path
from typing import Annotated, Any

import typer

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
Seed = Annotated[
    int | None, typer.Option(help="Fixes every random choice.", show_default="0")
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were typed; the figure has the defaults of the others."""
    return {name: value for name, value in options.items() if value not in (None, [])}
