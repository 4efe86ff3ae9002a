"""Images as files: ROOT/train/CLASS/FILE and ROOT/test/CLASS/FILE."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from knnper.config.errors import DataError
from knnper.config.ranges import PositiveInt
from knnper.config.sections import Settings
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.decoded_images import ImageForm, write_images
from knnper.data.folder_listing import FolderListing, list_folder


@dataclass(frozen=True)
class ImageFolderSettings(Settings):
    """Where the images are and what they are decoded to.

    Attributes
    ----------
    root
        The folder that holds ``train`` and ``test``, each with one folder per class.
    image_size
        Height and width that every image is resized to, in pixels; null keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    client_separator
        Where file names begin with the name of the client whose image it is, the text
        that ends this name: "_" for ``f0123_17.png``. The partition ``natural`` needs
        it.
    """

    root: str
    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    client_separator: Annotated[str, Field(min_length=1)] | None = None


def load_image_folder(settings: ImageFolderSettings) -> Dataset:
    """Return the images below ``settings.root``; the classes are those of ``train``.

    Hidden files are left out.

    Raises
    ------
    DataError
        If the folder is not laid out as expected, an image cannot be read, or the
        sizes differ while ``image_size`` is null. The message names the file.
    """
    listing = list_folder(Path(settings.root).expanduser().absolute())
    source = {
        "files": listing.fingerprint(),
        "image_size": settings.image_size,
        "channels": settings.channels,
        "client_separator": settings.client_separator,
    }
    return cached_dataset(
        "image_folder", source, lambda writer: _build(writer, listing, settings)
    )


def _build(
    writer: EntryWriter, listing: FolderListing, settings: ImageFolderSettings
) -> Contents:
    paths = {split: listing.paths(split) for split in listing.splits}
    write_images(writer, paths, ImageForm(settings.image_size, settings.channels))
    for split in listing.splits:
        writer.put_labels(split, listing.labels(split))
    if settings.client_separator is not None:
        _put_clients(writer, listing, settings.client_separator)
    return Contents(listing.class_names)


def _put_clients(writer: EntryWriter, listing: FolderListing, separator: str) -> None:
    """Store for each image its client, numbered in the order of their names."""
    owners: dict[Split, list[str]] = {
        split: [_owner(path, separator) for path in listing.paths(split)]
        for split in listing.splits
    }
    names = sorted({name for split in owners.values() for name in split})
    number_of = {name: number for number, name in enumerate(names)}
    for split, split_owners in owners.items():
        writer.put_client_ids(split, [number_of[name] for name in split_owners])


def _owner(path: str, separator: str) -> str:
    owner, found, _ = Path(path).name.partition(separator)
    if not found or not owner:
        raise DataError(
            f"the name of {path} does not begin with a client's name and "
            f"{separator!r}; rename it, or set data.client_separator to null"
        )
    return owner
