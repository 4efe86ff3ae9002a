"""Image files in folders of domains and classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from knnper.data.cache import CentralSplit, DatasetContents, EntryWriter, Source
from knnper.data.class_folders import (
    ListedFile,
    digest_of_files,
    files_below,
    folder_names,
    warn_of_unread,
)
from knnper.data.dividing import mark_balanced, numbered
from knnper.data.examples import Dataset
from knnper.data.images import ImageSettings
from knnper.data.split_names import is_split_name, refuse_splits
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt

_DOMAIN_LAYOUT = "DOMAIN/CLASS/FILE"
_RENAME = "and read them with data.name: image_folder; rename domains and classes"


@dataclass(frozen=True)
class DomainFolderSettings(ImageSettings):
    """Settings of a domain folder.

    Attributes
    ----------
    root
        A folder with one folder per domain, each with one folder per class.
    test_fraction
        Approximate fraction of test images in each domain, (0, 1): the same number of
        every class, but at most half of a class. 0.15 in Chen et al. 2023, section 5.
    seed
        Seed of the choice of test images.
    """

    name = "domain_folder"
    title = "Domain folder"
    summary = "your own images of several domains: ROOT/DOMAIN/CLASS/FILE"

    root: str
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Load the images below ``root`` and the domain of each."""
        root = Path(self.root).expanduser().absolute()
        domains = folder_names(root, _DOMAIN_LAYOUT, "domain")
        if not domains:
            raise DataError(
                f"{root} holds no domains; data.root must hold {_DOMAIN_LAYOUT}"
            )
        for name in domains:
            if is_split_name(name):
                raise DataError(
                    f"{root / name}: found the name of a split, expected that of a "
                    "domain; rename the folder, or read train/CLASS/FILE and "
                    "test/CLASS/FILE with data.name: image_folder"
                )
        refuse_splits(root, domains, _RENAME)
        files = [files_below(root, name, _DOMAIN_LAYOUT) for name in domains]
        class_names = tuple(
            sorted({file.class_name for part in files for file in part})
        )
        refuse_splits(root, class_names, _RENAME)
        everything = [file for part in files for file in part]
        if self.on_error == "skip":
            warn_of_unread(root, everything)
        images = self._divided(dict(zip(domains, files, strict=True)))
        if not images["test"]:
            raise DataError(
                f"{root}: found no images to test on, since data.test_fraction takes "
                "at most half of a class; some domain needs two images of a class"
            )
        source: Source = {
            "files": digest_of_files(class_names, everything),
            "test_fraction": self.test_fraction,
            "seed": self.seed,
        }

        def describe(writer: EntryWriter) -> DatasetContents:
            for split, part in images.items():
                classes = (file.class_name for _, file in part)
                writer.put_labels(split, numbered(classes, class_names))
                writer.put_domain_ids(split, [domain for domain, _ in part])
            return DatasetContents(class_names, domain_names=domains)

        paths = {
            split: [f"{root}/{file.name}" for _, file in part]
            for split, part in images.items()
        }
        return self.load_images(source, paths, describe)

    def _divided(
        self, files: Mapping[str, Sequence[ListedFile]]
    ) -> dict[CentralSplit, list[tuple[int, ListedFile]]]:
        """Split the files of each domain; pair each file with its domain's number."""
        key = RandomKey(self.seed).child("domain test")
        images: dict[CentralSplit, list[tuple[int, ListedFile]]] = {
            "train": [],
            "test": [],
        }
        for domain, (name, part) in enumerate(files.items()):
            kinds = [file.class_name for file in part]
            tested = mark_balanced(kinds, self.test_fraction, key.child(name))
            for file, is_test in zip(part, tested, strict=True):
                images["test" if is_test else "train"].append((domain, file))
        return images
