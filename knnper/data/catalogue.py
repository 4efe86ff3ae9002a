"""All formats of data that an experiment, or a site, can name."""

from collections.abc import Mapping

from knnper.data import (
    arrays,
    digits,
    hugging_face,
    images,
    leaf,
    synthetic_mixture,
    tables,
    text,
    torchvision_sets,
)
from knnper.data.examples import DataFormat, Dataset
from knnper.data.site_data import SiteSettings
from knnper.experiment import Choice, Settings

DATA_SETS: Mapping[str, type[DataFormat]] = {
    one.name: one
    for one in (
        digits.DigitsSettings,
        images.ImageFolderSettings,
        images.DomainFolderSettings,
        digits.DigitDomainsSettings,
        tables.TableSettings,
        arrays.NpzFileSettings,
        hugging_face.HuggingFaceSettings,
        text.PlaysSettings,
        synthetic_mixture.SyntheticMixtureSettings,
        torchvision_sets.Cifar10Settings,
        torchvision_sets.Cifar100Settings,
        torchvision_sets.FashionMnistSettings,
        torchvision_sets.MnistSettings,
        torchvision_sets.EmnistSettings,
        leaf.LeafSettings,
        leaf.FemnistHubSettings,
        leaf.LeafTextSettings,
    )
}
"""What the section ``data`` of an experiment names."""

SITE_DATA: Mapping[str, type[SiteSettings]] = {
    one.name: one
    for one in (
        images.SiteImageFolderSettings,
        arrays.NpzSettings,
        tables.SiteTableSettings,
        text.SiteTextSettings,
    )
}
"""What the section ``data`` of a client's file names."""


def load_data(choice: Choice[Settings]) -> Dataset:
    """Return the data set that the section ``data`` of an experiment names."""
    if isinstance(choice.settings, DataFormat):
        return choice.settings.load()
    if choice.entry is None:
        raise TypeError(f"{choice.name} is no data format: {choice.settings}")
    return arrays.load_own(choice)
