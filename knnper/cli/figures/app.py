"""The commands of ``knnper figure``, together."""

import typer

from knnper.cli.figures.drift import drift
from knnper.cli.figures.fedbasis_collapse import fedbasis_collapse
from knnper.cli.figures.memory import memory
from knnper.cli.figures.protonn import protonn
from knnper.cli.figures.quality import quality
from knnper.cli.figures.three_approaches import three_approaches

figure = typer.Typer(
    name="figure",
    no_args_is_help=True,
    help="Draw a figure of the papers, most with the global model of a finished run.",
)

for _command in (
    memory,
    quality,
    drift,
    protonn,
    fedbasis_collapse,
    three_approaches,
):
    figure.command()(_command)
