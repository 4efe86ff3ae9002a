"""``knnper report``: finished runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table

RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Write the table as Markdown.")
]


def report(
    runs: RunFolders, as_json: AsJson = False, markdown: AsMarkdown = False
) -> None:
    """Compare finished runs: one row a method, for seen and unseen clients."""
    if as_json and markdown:
        raise typer.BadParameter("give one of --json and --markdown, not both")
    # Loading the titles of the methods loads torch.
    from simulation.report import (
        as_cells,
        as_documents,
        as_markdown,
        comparison_table,
        load_run,
    )

    rows = comparison_table(load_run(path) for path in runs)
    if as_json:
        print_json(as_documents(rows))
    elif markdown:
        typer.echo(as_markdown(rows))
    else:
        header, *cells = as_cells(rows)
        print_table(header, cells)
