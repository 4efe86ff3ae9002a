"""From what was typed to a figure, and to its table on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knnper.cli.figures.progress import progress
from knnper.cli.output import print_shown, say

if TYPE_CHECKING:
    from simulation.figures.catalogue import FigureSpec, Subject

# All that the functions import loads torch, which `knnper --help` need not wait for.


def draw_of_run(name: str, run: Path, output: Path, options: Mapping[str, Any]) -> None:
    """Draw a figure with the global model of a finished run."""
    from simulation.figures.catalogue import OF_RUNS, parse_options
    from simulation.trained_model import trained_model

    parsed = parse_options(name, options)
    _draw(OF_RUNS[name], trained_model(run), output, parsed)


def draw_of_experiment(
    name: str,
    experiment: Path,
    overrides: Sequence[str],
    output: Path,
    options: Mapping[str, Any],
) -> None:
    """Draw a figure that trains what it shows."""
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.figures.catalogue import OF_EXPERIMENTS, parse_options

    parsed = parse_options(name, options)
    settings = read_experiment(experiment, experiment_catalogue(), overrides)
    _draw(OF_EXPERIMENTS[name], settings, output, parsed)


def draw_of_nothing(name: str, output: Path, options: Mapping[str, Any]) -> None:
    """Draw a figure that needs neither a run nor an experiment."""
    from simulation.figures.catalogue import OF_NOTHING, parse_options

    _draw(OF_NOTHING[name], None, output, parse_options(name, options))


def _draw(
    figure: "FigureSpec[Subject]", subject: "Subject", output: Path, options: object
) -> None:
    with progress(figure.parts) as on_part:
        shown = figure.make(subject, output, options, on_part)
    print_shown(shown)
    say(f"Numbers and pictures are in {output}")
