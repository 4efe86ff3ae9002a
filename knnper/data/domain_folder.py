"""Images of several domains as files: ROOT/DOMAIN/CLASS/FILE."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.config.errors import DataError
from knnper.config.ranges import NonNegativeInt, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.decoded_images import ImageForm, write_images
from knnper.data.folder_listing import (
    FoundFile,
    digest_of,
    files_below,
    folder_names,
)

_LAYOUT = "DOMAIN/CLASS/FILE"
_NO_DOMAINS = frozenset({"train", "test", "val", "validation"})


@dataclass(frozen=True)
class DomainFolderSettings(Settings):
    """Where the images are, what they are decoded to, and how many are test images.

    Attributes
    ----------
    root
        The folder that holds one folder per domain, each with one folder per class.
    image_size
        Height and width that every image is resized to, in pixels; null keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    test_fraction
        Part of each domain that is tested on, (0, 1), about: the same number of images
        of every class, but at most half of those that a class has. 0.15 in
        fedbasis-pflbed.txt, section 5.
    seed
        Of the choice of these images.
    """

    root: str
    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0


def load_domain_folder(settings: DomainFolderSettings) -> Dataset:
    """Return the images below ``settings.root`` with the domain that each is from.

    The classes are those of all domains together; a domain need not have all of them.
    Hidden files are left out.

    Raises
    ------
    DataError
        If the folder is not laid out as expected, a domain is called as a split is, an
        image cannot be read, or the sizes differ while ``image_size`` is null. The
        message names the file.
    """
    listing = _list_domains(Path(settings.root).expanduser().absolute())
    source = {
        "files": digest_of(listing.class_names, listing.files.items()),
        "image_size": settings.image_size,
        "channels": settings.channels,
        "test_fraction": settings.test_fraction,
        "seed": settings.seed,
    }
    return cached_dataset(
        "domain_folder", source, lambda writer: _build(writer, listing, settings)
    )


def balanced_part(
    kinds: Sequence[str], fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Choose about a part of some images, of each kind the same number.

    Parameters
    ----------
    kinds
        What each of the n images is, n >= 1.
    fraction
        Part that is chosen, (0, 1). Shared out among the kinds that is the nearest
        whole number of each, and one at least; but of no kind more than half.
    key
        Fixes which. The choice within a kind does not depend on the others' names.

    Returns
    -------
    Whether each image is chosen, shape (n,).
    """
    found, kind_of = np.unique(np.asarray(kinds), return_inverse=True)
    wanted = max(1, int(fraction * len(kinds) / len(found) + 0.5))
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for number, kind in enumerate(found.tolist()):
        places = key.child(kind).numpy().permutation(np.flatnonzero(kind_of == number))
        chosen[places[: min(wanted, len(places) // 2)]] = True
    return chosen


@dataclass(frozen=True)
class _DomainListing:
    """The files of each domain, sorted by class and name; a label is a position."""

    root: Path
    class_names: tuple[str, ...]
    files: dict[str, list[FoundFile]]


def _list_domains(root: Path) -> _DomainListing:
    domains = folder_names(root, _LAYOUT, "domain")
    if not domains:
        raise DataError(f"{root} holds no domains; data.root must hold {_LAYOUT}")
    _require_no_splits(root, domains)
    files = {name: files_below(root / name, _LAYOUT) for name in domains}
    classes = {file.class_name for found in files.values() for file in found}
    return _DomainListing(root, tuple(sorted(classes)), files)


def _require_no_splits(root: Path, domains: Sequence[str]) -> None:
    splits = [name for name in domains if name.lower() in _NO_DOMAINS]
    if splits:
        raise DataError(
            f"{root / splits[0]}: found the name of a split, expected that of a "
            "domain; rename the folder, or read train/CLASS/FILE and test/CLASS/FILE "
            "with data.name: image_folder"
        )


@dataclass(frozen=True)
class _Image:
    """One image of a split: its file, and the positions of its class and domain."""

    split: Split
    path: str
    label: int
    domain: int


def _build(
    writer: EntryWriter, listing: _DomainListing, settings: DomainFolderSettings
) -> Contents:
    found = list(_images(listing, settings))
    if not any(one.split == "test" for one in found):
        raise DataError(
            f"{listing.root}: there are no images to test on, since data.test_fraction "
            "takes at most half of a class; some domain needs two images of a class"
        )
    splits: tuple[Split, ...] = ("train", "test")
    images = {split: [one for one in found if one.split == split] for split in splits}
    paths = {split: [one.path for one in part] for split, part in images.items()}
    write_images(writer, paths, ImageForm(settings.image_size, settings.channels))
    for split, part in images.items():
        writer.put_labels(split, [one.label for one in part])
        writer.put_domain_ids(split, [one.domain for one in part])
    return Contents(listing.class_names, domain_names=tuple(listing.files))


def _images(
    listing: _DomainListing, settings: DomainFolderSettings
) -> Iterator[_Image]:
    label_of = {name: label for label, name in enumerate(listing.class_names)}
    key = RandomKey(settings.seed).child("domain test")
    for domain, (name, files) in enumerate(listing.files.items()):
        kinds = [file.class_name for file in files]
        tested = balanced_part(kinds, settings.test_fraction, key.child(name))
        for file, is_test in zip(files, tested, strict=True):
            path = str(listing.root / name / file.class_name / file.name)
            split: Split = "test" if is_test else "train"
            yield _Image(split, path, label_of[file.class_name], domain)
