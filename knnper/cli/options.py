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
OptionalExperimentFile = Annotated[
    Path | None,
    typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment's file."),
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Go on with the run in this folder."),
]
FromRound = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --resume: go back to the checkpoint of round N; what came later is "
        "put aside.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the run that is in the folder.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write JSON to standard output, nothing else.")
]


def require_resume(from_round: int | None, resume: Path | None) -> None:
    """Refuse to go back to a round of a run that only begins.

    Raises
    ------
    typer.BadParameter
        With ``--from-round`` and without ``--resume``.
    """
    if from_round is not None and resume is None:
        raise typer.BadParameter("--from-round goes with --resume DIR")
