"""What an experiment can choose from, wherever its data is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from knnper.config.catalogue import Catalogue, SettingsTypes
from knnper.config.errors import Problem
from knnper.config.sections import Experiment, Settings
from knnper.data.augmentation import augmentation_problems
from knnper.data.site.agreement import SITES, SitesSettings
from knnper.models.base import ModelSettings
from knnper.models.catalogue import MODELS
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS, NoSettings
from strategies.personalizers import PERSONALIZERS

SITE_DATA_SETS: SettingsTypes = MappingProxyType({SITES: SitesSettings})
SITE_PARTITIONS: SettingsTypes = MappingProxyType({SITES: NoSettings})


class Entry(Protocol):
    """What the tables of data sets, partitions, models and methods have in common."""

    @property
    def settings_type(self) -> type[Settings]:
        """Return what the section takes beside the name."""


def settings_types(entries: Mapping[str, Entry]) -> SettingsTypes:
    """Return the type of each entry's settings by its name."""
    return {name: entry.settings_type for name, entry in entries.items()}


def catalogue_of(
    data: SettingsTypes,
    partition: SettingsTypes,
    check: Callable[[Experiment], Sequence[Problem]],
) -> Catalogue:
    """Return the catalogue of all models and methods, over the given data.

    Parameters
    ----------
    data, partition
        What these sections choose from.
    check
        Finds what does not go together, beside what a method's own check finds.
    """

    def check_all(experiment: Experiment) -> Sequence[Problem]:
        return (
            *check(experiment),
            *_input_problems(experiment),
            *METHODS[experiment.method.name].check(experiment),
            *_personalization_problems(experiment),
            *PERSONALIZERS[experiment.personalization.name].check(experiment),
        )

    return Catalogue(
        data=data,
        partition=partition,
        model=settings_types(MODELS),
        method=settings_types(METHODS),
        personalization=settings_types(PERSONALIZERS),
        personalization_of={
            name: spec.personalization for name, spec in METHODS.items()
        },
        check=check_all,
    )


def title_of(method: str, personalization: str) -> str:
    """Return what tables call a method with what is put on top of it.

    Parameters
    ----------
    method, personalization
        Names; of another version, perhaps, and then given as they are.
    """
    known = METHODS.get(method)
    title = known.title if known else method
    if personalization == (known.personalization if known else AS_IT_IS):
        return title
    on_top = PERSONALIZERS.get(personalization)
    return f"{title} + {on_top.title if on_top else personalization}"


def _personalization_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield why a personalisation cannot be put on top of the method."""
    method, name = experiment.method.name, experiment.personalization.name
    spec, on_top = METHODS[method], PERSONALIZERS[name]
    if spec.personalization not in (AS_IT_IS, name):
        message = (
            f"found {name} with {method}, which always has {spec.personalization}; "
            "choose the method without it, such as fedavg"
        )
        yield Problem("personalization.name", message)
    elif on_top.needs_one_model and not spec.serves_one_model:
        others = [key for key, one in PERSONALIZERS.items() if not one.needs_one_model]
        message = (
            f"found {name} with {method}, whose clients are not served one set of "
            f"weights; expected one of {', '.join(others)}"
        )
        yield Problem("personalization.name", message)


def _input_problems(experiment: Experiment) -> Iterable[Problem]:
    """Yield what cannot be done with the data's kind of input, where it is known."""
    data = experiment.data.settings
    if isinstance(data, SitesSettings):
        yield from augmentation_problems(experiment.training.augmentation, data.dtype)


def without_start(experiment: Experiment) -> Experiment:
    """Return the experiment less the file of initial weights.

    Only the server, and only when training begins, needs that file.
    """
    settings = experiment.model.settings
    if not isinstance(settings, ModelSettings):
        raise TypeError(f"expected ModelSettings, found {type(settings).__name__}")
    choice = replace(experiment.model, settings=replace(settings, weights=None))
    return replace(experiment, model=choice)


def site_catalogue() -> Catalogue:
    """Return the catalogue of experiments over data that stays with the sites."""
    return catalogue_of(SITE_DATA_SETS, SITE_PARTITIONS, lambda _: ())
