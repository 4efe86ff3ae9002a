"""The data formats that an experiment or a site can name."""

from collections.abc import Mapping

from knnper.data.arrays import NpzFileSettings, NpzSettings
from knnper.data.digits import DigitDomainsSettings, DigitsSettings
from knnper.data.domain_folder import DomainFolderSettings
from knnper.data.examples import DataFormat, Dataset
from knnper.data.hugging_face import HuggingFaceSettings
from knnper.data.image_folders import ImageFolderSettings, SiteImageFolderSettings
from knnper.data.leaf import FemnistHubSettings, LeafSettings, LeafTextSettings
from knnper.data.own_data import load_own
from knnper.data.site_data import SiteSettings
from knnper.data.synthetic_mixture import SyntheticMixtureSettings
from knnper.data.tables import SiteTableSettings, TableSettings
from knnper.data.text import PlaysSettings, SiteTextSettings
from knnper.data.torchvision_sets import (
    Cifar10Settings,
    Cifar100Settings,
    EmnistSettings,
    FashionMnistSettings,
    MnistSettings,
)
from knnper.settings import Choice, Settings

DATA_SETS: Mapping[str, type[DataFormat]] = {
    data_format.name: data_format
    for data_format in (
        DigitsSettings,
        ImageFolderSettings,
        DomainFolderSettings,
        DigitDomainsSettings,
        TableSettings,
        NpzFileSettings,
        HuggingFaceSettings,
        PlaysSettings,
        SyntheticMixtureSettings,
        Cifar10Settings,
        Cifar100Settings,
        FashionMnistSettings,
        MnistSettings,
        EmnistSettings,
        LeafSettings,
        FemnistHubSettings,
        LeafTextSettings,
    )
}
"""Formats for the section ``data`` of an experiment, by name."""

SITE_DATA: Mapping[str, type[SiteSettings]] = {
    site_format.name: site_format
    for site_format in (
        SiteImageFolderSettings,
        NpzSettings,
        SiteTableSettings,
        SiteTextSettings,
    )
}
"""Formats for the section ``data`` of a client's file, by name."""


def load_data(choice: Choice[Settings]) -> Dataset:
    """Load the data set that the section ``data`` of an experiment names."""
    if isinstance(choice.settings, DataFormat):
        return choice.settings.load()
    if choice.entry is None:
        raise TypeError(f"{choice.name} is not a data format: {choice.settings}")
    return load_own(choice)
