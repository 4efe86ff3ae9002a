"""Arguments that several of these commands take."""

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The federation's folder.")
]
Place = Annotated[
    Path,
    typer.Argument(
        metavar="SERVER.yaml",
        help="The server's settings, or the federation's folder.",
    ),
]
ClientName = Annotated[str, typer.Argument(metavar="NAME", help="The client's name.")]
