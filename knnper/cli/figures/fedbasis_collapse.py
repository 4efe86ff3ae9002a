"""``knnper figure fedbasis-collapse``: bases that become one."""

from knnper.cli.figures.drawing import draw_of_experiment
from knnper.cli.figures.options import Output
from knnper.cli.options import ExperimentFile, Overrides


def fedbasis_collapse(
    experiment: ExperimentFile, output: Output, overrides: Overrides = None
) -> None:
    """Train FedBasis with and without what keeps its bases apart (Figure 2)."""
    name = "fedbasis-collapse"
    draw_of_experiment(name, experiment, overrides or (), output, {})
