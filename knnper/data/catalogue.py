"""All formats of data that an experiment, or a site, can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from knnper.data.arrays import (
    NpzSettings,
    PythonSettings,
    collect_npz,
    collect_python,
)
from knnper.data.digits import (
    DigitDomainsSettings,
    DigitsSettings,
    load_digit_domains,
    load_digits,
)
from knnper.data.examples import Dataset
from knnper.data.images import (
    DomainFolderSettings,
    ImageFolderSettings,
    SiteImageFolderSettings,
    collect_image_folder,
    load_domain_folder,
    load_image_folder,
)
from knnper.data.leaf import (
    FemnistHubSettings,
    LeafSettings,
    LeafTextSettings,
    load_femnist_hub,
    load_leaf_femnist,
    load_leaf_shakespeare,
)
from knnper.data.site_data import Collected, SiteSettings, SiteTask
from knnper.data.synthetic_mixture import (
    SyntheticMixtureSettings,
    load_synthetic_mixture,
)
from knnper.data.tables import (
    SiteTableSettings,
    TableSettings,
    collect_table,
    load_table,
)
from knnper.data.text import PlaysSettings, SiteTextSettings, collect_text, load_plays
from knnper.data.torchvision_sets import (
    DownloadSettings,
    EmnistSettings,
    load_cifar10,
    load_cifar100,
    load_emnist,
    load_fashion_mnist,
)
from knnper.data.user_csv import UserCsvSettings, load_user_csv
from knnper.experiment import Settings


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
        "domain_folder": DataSpec(
            "Domain folder",
            "your own images of several domains: ROOT/DOMAIN/CLASS/FILE",
            DomainFolderSettings,
            load_domain_folder,
        ),
        "digit_domains": DataSpec(
            "Digits in domains",
            "the 1,797 digits, each plain, inverted, rotated or blurred",
            DigitDomainsSettings,
            load_digit_domains,
        ),
        "user_csv": DataSpec(
            "User CSV",
            "images of many users, listed in CSV files, as Google Landmarks is",
            UserCsvSettings,
            load_user_csv,
        ),
        "table": DataSpec(
            "Table",
            "your own rows of features: CSV or Parquet files, a column a feature",
            TableSettings,
            load_table,
        ),
        "plays": DataSpec(
            "Plays",
            "your own text: plays, or what each speaker says; the next character",
            PlaysSettings,
            load_plays,
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
        "leaf_femnist": DataSpec(
            "FEMNIST (LEAF)",
            "EMNIST by writer, from LEAF's files: 3,550 writers, 62 classes",
            LeafSettings,
            load_leaf_femnist,
        ),
        "femnist_hub": DataSpec(
            "FEMNIST (Hub)",
            "the same, downloaded from the Hugging Face Hub through flwr-datasets",
            FemnistHubSettings,
            load_femnist_hub,
        ),
        "leaf_shakespeare": DataSpec(
            "Shakespeare (LEAF)",
            "the next character, by speaking role, from LEAF's files",
            LeafTextSettings,
            load_leaf_shakespeare,
        ),
    }
)


@dataclass(frozen=True)
class SiteDataSpec:
    """A kind of a site's own data that can be chosen by name.

    Attributes
    ----------
    title, summary
        For people.
    settings_type
        The dataclass of its settings.
    collect
        Takes an instance of ``settings_type``, the folder that relative paths are
        relative to, and the task, where one is known.
    """

    title: str
    summary: str
    settings_type: type[SiteSettings]
    collect: Callable[[Any, Path, SiteTask | None], Collected]


SITE_DATA: Mapping[str, SiteDataSpec] = MappingProxyType(
    {
        "image_folder": SiteDataSpec(
            "Image folder",
            "image files: PATH/CLASS/FILE, or PATH/train/CLASS/FILE and so on",
            SiteImageFolderSettings,
            collect_image_folder,
        ),
        "npz": SiteDataSpec(
            "NPZ file",
            "arrays inputs and labels, or train_inputs, train_labels, ...",
            NpzSettings,
            collect_npz,
        ),
        "table": SiteDataSpec(
            "Table",
            "a CSV or Parquet file: a row an example, a column a feature",
            SiteTableSettings,
            collect_table,
        ),
        "text": SiteDataSpec(
            "Text",
            "plain text: a window of characters, and the one that follows",
            SiteTextSettings,
            collect_text,
        ),
        "python": SiteDataSpec(
            "Python function",
            "your own code: module:function, beside the client's file or installed",
            PythonSettings,
            collect_python,
        ),
    }
)
