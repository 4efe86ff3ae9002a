"""All figures by name, and the files that describe them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from knnper import ConfigError, Experiment, Problem, Settings
from knnper.experiment_file import load_experiment
from knnper.process import with_fixed_threads
from knnper.settings import Name, parse_settings
from knnper.simulation.batches.documents import shared_sections
from knnper.simulation.batches.grid import as_overrides
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.reports.table import Shown
from knnper.simulation.trained_model import TrainedModel
from knnper.yaml_text import read_yaml
from papers.collapse import CollapseSettings, draw_collapse
from papers.drift import DriftSettings, draw_drift
from papers.figures import Drawing, FigureFolder, OnPart, identity_of
from papers.memory import MemorySettings, draw_memory
from papers.protonn import ProtoNNFigureSettings, draw_protonn
from papers.quality import QualitySettings, draw_quality
from papers.three_approaches import ThreeApproachesSettings, draw_three_approaches

RUN, EXPERIMENT, NOTHING = "a finished run", "an experiment", "nothing"
_SHARED = ("only",)  # settings that may differ between figures in one folder


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the papers."""

    settings: type[Settings]
    # `RUN`: the figure uses the global model of a run. `EXPERIMENT`: it trains its own
    # models. `NOTHING`: it also makes its own data.
    needs: str
    parts: str  # plural noun of the separately finished parts
    # ``(subject, settings, folder) -> drawings``
    draw: Callable[[Any, Any, FigureFolder], list[Drawing]]


FIGURES: Mapping[str, PaperFigure] = {
    "memory": PaperFigure(MemorySettings, RUN, "partitions", draw_memory),
    "drift": PaperFigure(DriftSettings, RUN, "clients", draw_drift),
    "protonn": PaperFigure(ProtoNNFigureSettings, RUN, "clients", draw_protonn),
    "quality": PaperFigure(QualitySettings, EXPERIMENT, "stages", draw_quality),
    "fedbasis-collapse": PaperFigure(
        CollapseSettings, EXPERIMENT, "trainings", draw_collapse
    ),
    "three-approaches": PaperFigure(
        ThreeApproachesSettings, NOTHING, "points", draw_three_approaches
    ),
}

FigureName = Literal[
    "memory", "quality", "drift", "protonn", "fedbasis-collapse", "three-approaches"
]


def make_figure(
    name: str,
    subject: TrainedModel | Experiment | None,
    settings: Settings,
    output: Path,
    on_part: OnPart = lambda *_: None,
) -> Shown:
    """Make a figure in a folder, or resume it."""
    if isinstance(subject, Experiment):
        subject = with_fixed_threads(subject)
    values = to_jsonable_python(settings)
    identity = {
        "figure": name,
        **identity_of(subject),
        "settings": {key: value for key, value in values.items() if key not in _SHARED},
    }
    with FigureFolder.open(output, identity, on_part) as folder:
        return folder.write(FIGURES[name].draw(subject, settings, folder))


@dataclass(frozen=True)
class FigureFileSettings(Settings):
    """Settings in a figure's file.

    Attributes
    ----------
    name
        Name of the output folder.
    figure
        Name of the figure in the catalogue.
    experiment
        Path of an experiment's file, relative to this file.
    base
        Sections of an experiment, in place of ``experiment``.
    set
        Overrides of the experiment's settings by dotted key.
    options
        Settings of the figure itself.
    """

    name: Name
    figure: FigureName
    experiment: str | None = None
    base: dict[str, Any] | None = None
    set: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FigurePlan:
    """A validated figure's file; the experiment is None if the figure needs none."""

    name: str
    figure: str
    options: Settings
    experiment: Experiment | None


def parse_options(name: str, values: Mapping[str, Any]) -> Settings:
    """Parse the settings of a figure."""
    problems = list[Problem]()
    if name not in FIGURES:
        message = f"found {name!r}, expected one of {', '.join(FIGURES)}"
        raise ConfigError([Problem("figure", message)], "the figure")
    options = parse_settings(FIGURES[name].settings, dict(values), "options", problems)
    if options is None:
        raise ConfigError(problems, f"the figure {name}")
    return options


def read_figure(path: Path) -> FigurePlan:
    """Read a figure's YAML file."""
    problems = list[Problem]()
    settings = parse_settings(FigureFileSettings, read_yaml(path), "", problems)
    if settings is None:
        raise ConfigError(problems, str(path))
    figure, experiment = FIGURES[settings.figure], None
    options = parse_settings(figure.settings, settings.options, "options", problems)
    problems.extend(_problems_of(settings, figure))
    if not problems and figure.needs != NOTHING:
        try:
            experiment = _experiment(settings, path)
        except ConfigError as error:
            problems.extend(error.problems)
    if options is None or problems:
        raise ConfigError(problems, str(path))
    return FigurePlan(settings.name, settings.figure, options, experiment)


def _problems_of(
    settings: FigureFileSettings, figure: PaperFigure
) -> Iterator[Problem]:
    sources = [name for name in ("experiment", "base") if getattr(settings, name)]
    if figure.needs == NOTHING:
        for name in [*sources, *(["set"] if settings.set else [])]:
            message = f"found one, expected none: {settings.figure} trains its own"
            yield Problem(name, message)
    elif len(sources) != 1:
        message = "expected the sections of an experiment, or experiment: PATH; one of"
        yield Problem("base", f"{message} the two")


def _experiment(settings: FigureFileSettings, path: Path) -> Experiment:
    shared = shared_sections(settings.base, settings.experiment, path)
    document = {"name": settings.name, **shared}
    changes = as_overrides(settings.set)
    folder = path.absolute().parent
    return load_experiment(document, experiment_catalogue(), changes, str(path), folder)
