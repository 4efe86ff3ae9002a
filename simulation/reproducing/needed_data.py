"""Whether the data that a file needs are there, before anything is trained."""

from collections.abc import Iterator
from pathlib import Path

from knnper.config.errors import DataError
from knnper.config.sections import Choice, Experiment, Settings
from knnper.data.catalogue import DATA_SETS
from knnper.data.leaf.femnist_hub import FemnistHubSettings
from knnper.data.torchvision_sets import DownloadSettings
from simulation.comparison.plan import Comparison
from simulation.reproducing.figure_file import FigurePlan
from simulation.reproducing.protocols import Plan
from simulation.sites import require_central
from simulation.sweep.plan import Sweep


class MissingDataError(DataError):
    """The data of a file are not on this machine."""


def require_data(plan: Plan) -> None:
    """Do nothing if all data that a plan needs can be loaded.

    Raises
    ------
    MissingDataError
        If they are not where the plan says; with the data set's own words.
    DataError
        If they are there and cannot be loaded.
    RunError
        If the data stays with the sites.
    """
    # Settings have no order and need not be hashable; there are few different ones.
    loaded = list[Choice[Settings]]()
    for experiment in _experiments_of(plan):
        require_central(experiment)
        if experiment.data not in loaded:
            loaded.append(experiment.data)
            _load(experiment.data)


def _load(data: Choice[Settings]) -> None:
    try:
        DATA_SETS[data.name].load(data.settings)
    except DataError as error:
        if _is_elsewhere(data.settings):
            raise MissingDataError(str(error)) from error
        raise


def _is_elsewhere(settings: Settings) -> bool:
    """Return whether data that cannot be loaded are not there at all."""
    if isinstance(settings, DownloadSettings | FemnistHubSettings):
        return True
    places = (getattr(settings, name, None) for name in ("root", "path"))
    return any(
        isinstance(place, str) and not Path(place).expanduser().exists()
        for place in places
    )


def _experiments_of(plan: Plan) -> Iterator[Experiment]:
    match plan:
        case Experiment():
            yield plan
        case Sweep():
            yield from plan.experiments
        case Comparison():
            yield from (one.tuning for row in plan.rows for one in row.candidates)
        case FigurePlan(experiment=Experiment() as experiment):
            yield experiment
