"""From an experiment over a central data set to the same one over sites' own data."""

from dataclasses import replace

from knnper.config.errors import RunError
from knnper.config.sections import Choice, Experiment
from knnper.data.catalogue import DATA_SETS
from knnper.data.site.agreement import SITES, SitesSettings, sites_settings, task_of
from strategies.core.method import NoSettings


def over_sites(experiment: Experiment) -> Experiment:
    """Return the experiment over data that stays with the sites.

    What the sites agree on - form of the inputs, how they are normalised, the names of
    the classes - is that of the central data set. An experiment that is over sites
    already is returned as it is.

    Raises
    ------
    DataError
        If the data set cannot be loaded.
    """
    if experiment.data.name == SITES:
        return experiment
    dataset = DATA_SETS[experiment.data.name].load(experiment.data.settings)
    return replace(
        experiment,
        data=Choice(SITES, sites_settings(task_of(dataset))),
        partition=Choice(SITES, NoSettings()),
    )


def require_central(experiment: Experiment) -> None:
    """Refuse an experiment whose data stays with the sites.

    Raises
    ------
    RunError
        If it does.
    """
    if isinstance(experiment.data.settings, SitesSettings):
        raise RunError(
            "the experiment is over data that stays with the sites, so it cannot be "
            "simulated; run it on them with `knnper submit`, or name a data set in the "
            "section data and how it is dealt in the section partition"
        )
