"""The file of a figure: what is drawn, of which experiment, with which options."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from knnper.config.errors import ConfigError, Problem
from knnper.config.loading import load_experiment
from knnper.config.names import Name
from knnper.config.parsing import parse_settings
from knnper.config.sections import Experiment, Settings
from knnper.config.yaml_text import read_yaml
from simulation.catalogue import experiment_catalogue
from simulation.figures.catalogue import OF_NOTHING, OPTIONS
from simulation.shared_sections import shared_sections

FigureName = Literal[
    "memory", "quality", "drift", "protonn", "fedbasis-collapse", "three-approaches"
]


@dataclass(frozen=True)
class FigureFileSettings(Settings):
    """A figure of the papers.

    Attributes
    ----------
    name
        Names its folder.
    figure
        What ``knnper figure`` calls it.
    experiment
        The path of an experiment's file, from the folder of this one.
    base
        In place of ``experiment`` the sections of one.
    set
        Settings of the experiment by dotted key, on top of these.
    options
        Those of the figure's command, with underscores in their names.
    """

    name: Name
    figure: FigureName
    experiment: str | None = None
    base: dict[str, Any] | None = None
    set: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FigurePlan:
    """A figure, validated.

    Attributes
    ----------
    name, figure
        See `FigureFileSettings`.
    options
        Of the type that `simulation.figures.catalogue.OPTIONS` has for it.
    experiment
        What it needs; None where it needs none.
    """

    name: str
    figure: FigureName
    options: Settings
    experiment: Experiment | None


def read_figure(path: Path) -> FigurePlan:
    """Return the figure that the YAML file at ``path`` describes.

    Raises
    ------
    ConfigError
        With all that is wrong with it, or with its experiment.
    """
    problems = list[Problem]()
    settings = parse_settings(FigureFileSettings, read_yaml(path), "", problems)
    if settings is None:
        raise ConfigError(problems, str(path))
    options_type = OPTIONS[settings.figure]
    options = parse_settings(options_type, settings.options, "options", problems)
    problems.extend(_problems_of(settings))
    experiment = None if problems else _experiment(settings, path, problems)
    if options is None or problems:
        raise ConfigError(problems, str(path))
    return FigurePlan(settings.name, settings.figure, options, experiment)


def _problems_of(settings: FigureFileSettings) -> Iterable[Problem]:
    given = [name for name in ("experiment", "base") if getattr(settings, name)]
    if settings.figure in OF_NOTHING:
        for name in [*given, *(["set"] if settings.set else [])]:
            message = f"found one, expected none: {settings.figure} trains its own"
            yield Problem(name, message)
    elif len(given) != 1:
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")


def _experiment(
    settings: FigureFileSettings, path: Path, problems: list[Problem]
) -> Experiment | None:
    if settings.figure in OF_NOTHING:
        return None
    try:
        shared = shared_sections(settings.base, settings.experiment, path)
        document = {"name": settings.name, **shared}
        changes = [f"{key}={json.dumps(value)}" for key, value in settings.set.items()]
        return load_experiment(document, experiment_catalogue(), changes, str(path))
    except ConfigError as error:
        problems.extend(error.problems)
        return None
