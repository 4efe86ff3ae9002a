"""All data sets that an experiment can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from knnper.config.sections import Settings
from knnper.data.dataset import Dataset
from knnper.data.digits import DigitsSettings, load_digits
from knnper.data.image_folder import ImageFolderSettings, load_image_folder
from knnper.data.synthetic_mixture import (
    SyntheticMixtureSettings,
    load_synthetic_mixture,
)
from knnper.data.table_set import TableSettings, load_table
from knnper.data.torchvision_sets import (
    DownloadSettings,
    EmnistSettings,
    load_cifar10,
    load_cifar100,
    load_emnist,
    load_fashion_mnist,
)


@dataclass(frozen=True)
class DataSpec:
    """A data set that can be chosen by name.

    Attributes
    ----------
    title, summary
        For people.
    settings_type
        The dataclass of its settings.
    load
        Takes an instance of ``settings_type``.
    """

    title: str
    summary: str
    settings_type: type[Settings]
    load: Callable[[Any], Dataset]


DATA_SETS: Mapping[str, DataSpec] = MappingProxyType(
    {
        "digits": DataSpec(
            "Digits",
            "1,797 handwritten digits of 8x8 pixels; comes with scikit-learn",
            DigitsSettings,
            load_digits,
        ),
        "image_folder": DataSpec(
            "Image folder",
            "your own images: ROOT/train/CLASS/FILE and ROOT/test/CLASS/FILE",
            ImageFolderSettings,
            load_image_folder,
        ),
        "table": DataSpec(
            "Table",
            "your own rows of features: CSV or Parquet files, a column a feature",
            TableSettings,
            load_table,
        ),
        "synthetic_mixture": DataSpec(
            "Synthetic mixture",
            "labels of users that fall into clusters, and no inputs; made, not loaded",
            SyntheticMixtureSettings,
            load_synthetic_mixture,
        ),
        "cifar10": DataSpec(
            "CIFAR-10",
            "60,000 colour photographs of 32x32 pixels, ten classes",
            DownloadSettings,
            load_cifar10,
        ),
        "cifar100": DataSpec(
            "CIFAR-100",
            "60,000 colour photographs of 32x32 pixels, 100 classes in 20 groups",
            DownloadSettings,
            load_cifar100,
        ),
        "fashion_mnist": DataSpec(
            "Fashion-MNIST",
            "70,000 grey pictures of clothes of 28x28 pixels, ten classes",
            DownloadSettings,
            load_fashion_mnist,
        ),
        "emnist": DataSpec(
            "EMNIST",
            "handwritten letters and digits of 28x28 pixels, 10 to 62 classes",
            EmnistSettings,
            load_emnist,
        ),
    }
)
