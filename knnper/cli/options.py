"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ExperimentFile = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment's file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, as in --set training.num_rounds=50; may be repeated.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write JSON to standard output, nothing else.")
]
