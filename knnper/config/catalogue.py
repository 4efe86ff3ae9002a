"""What the sections of an experiment may choose from by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from knnper.config.errors import Problem
from knnper.config.sections import Experiment, Settings

SettingsTypes = Mapping[str, type[Settings]]


@dataclass(frozen=True)
class Catalogue:
    """The names that exist and the settings that each takes.

    Attributes
    ----------
    data, partition, model, method
        From the names that a section accepts to the type of its other keys.
    personalization
        As these, of what can be put on top of a method.
    personalization_of
        From a method's name to that of its personalisation where none is named.
    check
        Finds what in an otherwise valid experiment does not go together.
    """

    data: SettingsTypes
    partition: SettingsTypes
    model: SettingsTypes
    method: SettingsTypes
    personalization: SettingsTypes
    personalization_of: Mapping[str, str]
    check: Callable[[Experiment], Sequence[Problem]]
