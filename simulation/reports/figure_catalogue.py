"""All figures by name: their options, what they are drawn of, and how."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, Settings
from knnper.loading import parse_settings
from knnper.simulation.reports.collapse_figure import show_collapse
from knnper.simulation.reports.drift_figure import show_drift
from knnper.simulation.reports.figure import (
    CollapseOptions,
    DriftOptions,
    FigureFolder,
    MemoryOptions,
    OnPart,
    ProtoNNOptions,
    QualityOptions,
    ThreeApproachesOptions,
)
from knnper.simulation.reports.memory_figures import show_memory
from knnper.simulation.reports.protonn_figure import show_protonn
from knnper.simulation.reports.quality_figure import show_quality
from knnper.simulation.reports.tables import Shown
from knnper.simulation.reports.three_approaches_figure import show_three_approaches
from knnper.simulation.trained_model import TrainedModel

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class FigureSpec(Generic[Subject]):
    """A figure.

    Attributes
    ----------
    options
        The dataclass of its options.
    parts
        What of it is finished one by one.
    show
        ``(subject, output, options, on_part) -> shown``: makes the figure in a folder,
        or goes on with it.
    """

    options: type[Settings]
    parts: str
    show: Callable[[Subject, Path, Any, OnPart], Shown]

    def make(
        self, subject: Subject, output: Path, options: object, on_part: OnPart
    ) -> Shown:
        """Return what ``show`` does, and what to tell of parts that are older.

        Raises
        ------
        KnnPerError
            As ``show``.
        """
        shown = self.show(subject, output, options, on_part)
        older = FigureFolder(output).older_code()
        return replace(shown, remarks=(*shown.remarks, *older))


OF_RUNS: Mapping[str, FigureSpec[TrainedModel]] = MappingProxyType(
    {
        "memory": FigureSpec(MemoryOptions, "deals", show_memory),
        "drift": FigureSpec(DriftOptions, "clients", show_drift),
        "protonn": FigureSpec(ProtoNNOptions, "clients", show_protonn),
    }
)
"""Drawn with the global model of a finished run."""

OF_EXPERIMENTS: Mapping[str, FigureSpec[Experiment]] = MappingProxyType(
    {
        "quality": FigureSpec(QualityOptions, "stages", show_quality),
        "fedbasis-collapse": FigureSpec(CollapseOptions, "variants", show_collapse),
    }
)
"""These train what they show."""

OF_NOTHING: Mapping[str, FigureSpec[None]] = MappingProxyType(
    {
        "three-approaches": FigureSpec(
            ThreeApproachesOptions, "points", show_three_approaches
        )
    }
)
"""These train what they show, on data of their own."""

OPTIONS: Mapping[str, type[Settings]] = MappingProxyType(
    {
        name: figure.options
        for figures in (OF_RUNS, OF_EXPERIMENTS, OF_NOTHING)
        for name, figure in figures.items()
    }
)
"""The dataclass of the options by the name of the figure."""


def parse_options(name: str, values: Mapping[str, Any]) -> Settings:
    """Return the options of a figure; what is not given has its default.

    Raises
    ------
    ConfigError
        With all that is wrong with them.
    """
    problems = list[Problem]()
    options = parse_settings(OPTIONS[name], dict(values), "options", problems)
    if options is None:
        raise ConfigError(problems, f"the figure {name}")
    return options
