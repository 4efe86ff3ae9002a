"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from knnper.simulation.experiments import find_experiment

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also log every message of Flower.")
]
ClientFile = Annotated[
    Path, typer.Argument(metavar="CLIENT.yaml", help="The client's configuration file.")
]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Resume the run in this folder.")
]
FromRound = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --resume: go back to the checkpoint of round N; later rounds are "
        "deleted.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a run in the folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")]


def file_argument(metavar: str, noun: str) -> Any:
    """Return an argument for a file, or the name of a shipped one."""
    return typer.Argument(
        metavar=metavar,
        help=f"The {noun}'s file, or a name that `knnper list experiments` shows.",
        callback=lambda path: path and find_experiment(path),
    )


ExperimentFile = Annotated[Path, file_argument("EXPERIMENT.yaml", "experiment")]


def set_option(example: str) -> Any:
    """Return the option ``--set`` with an example in its help."""
    return typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"Change a setting, as in --set {example}; may be repeated.",
    )


Overrides = Annotated[list[str] | None, set_option("training.num_rounds=50")]


OptionalExperimentFile = Annotated[
    Path | None, file_argument("EXPERIMENT.yaml", "experiment")
]


def require_start(
    experiment: Path | None,
    resume: Path | None,
    from_round: int | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Reject options of a new run together with options of a resumed run."""
    if (experiment is None) == (resume is None):
        raise typer.BadParameter("give either EXPERIMENT.yaml or --resume DIR")
    if resume is None and from_round is not None:
        raise typer.BadParameter("--from-round goes with --resume DIR")
    if resume is not None and (output is not None or overwrite):
        raise typer.BadParameter("--resume goes with neither --output, --overwrite")
