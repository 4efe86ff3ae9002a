"""All formats of data that an experiment, or a site, can name."""

from collections.abc import Mapping

from knnper.data.arrays import NpzSettings, PythonSettings
from knnper.data.digits import DigitDomainsSettings, DigitsSettings
from knnper.data.examples import DataFormat
from knnper.data.images import (
    DomainFolderSettings,
    ImageFolderSettings,
    SiteImageFolderSettings,
)
from knnper.data.leaf import FemnistHubSettings, LeafSettings, LeafTextSettings
from knnper.data.site_data import SiteSettings
from knnper.data.synthetic_mixture import SyntheticMixtureSettings
from knnper.data.tables import SiteTableSettings, TableSettings
from knnper.data.text import PlaysSettings, SiteTextSettings
from knnper.data.torchvision_sets import (
    Cifar10Settings,
    Cifar100Settings,
    EmnistSettings,
    FashionMnistSettings,
)
from knnper.data.user_csv import UserCsvSettings

_FORMATS: tuple[type[DataFormat], ...] = (
    DigitsSettings,
    ImageFolderSettings,
    DomainFolderSettings,
    DigitDomainsSettings,
    UserCsvSettings,
    TableSettings,
    PlaysSettings,
    SyntheticMixtureSettings,
    Cifar10Settings,
    Cifar100Settings,
    FashionMnistSettings,
    EmnistSettings,
    LeafSettings,
    FemnistHubSettings,
    LeafTextSettings,
)

_SITE_FORMATS: tuple[type[SiteSettings], ...] = (
    SiteImageFolderSettings,
    NpzSettings,
    SiteTableSettings,
    SiteTextSettings,
    PythonSettings,
)

DATA_SETS: Mapping[str, type[DataFormat]] = {one.name: one for one in _FORMATS}
"""What the section ``data`` of an experiment names."""

SITE_DATA: Mapping[str, type[SiteSettings]] = {one.name: one for one in _SITE_FORMATS}
"""What the section ``data`` of a client's file names."""
