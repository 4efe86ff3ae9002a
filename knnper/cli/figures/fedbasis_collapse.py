"""``knnper figure fedbasis-collapse``: bases that become one."""

from knnper.cli.figures.options import Output, say_where
from knnper.cli.figures.progress import progress
from knnper.cli.options import ExperimentFile, Overrides
from knnper.cli.output import print_table


def fedbasis_collapse(
    experiment: ExperimentFile, output: Output, overrides: Overrides = None
) -> None:
    """Train FedBasis with and without what keeps its bases apart (Figure 2)."""
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.figures.collapse_figure import draw_collapse

    settings = read_experiment(experiment, experiment_catalogue(), overrides or ())
    with progress("variants") as on_part:
        found = draw_collapse(settings, output, on_part)
    header = ("treated", "similarity", "entropy", "accuracy", "unseen")
    rows = [
        (
            variant,
            *(f"{record[name][-1]:.3f}" for name in ("similarity", "entropy")),
            *(
                "" if record[name] is None else f"{100 * record[name]:.1f} %"
                for name in ("accuracy", "unseen_accuracy")
            ),
        )
        for variant, record in found.items()
    ]
    print_table(header, rows)
    say_where(output)
