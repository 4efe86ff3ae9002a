"""CIFAR-10, CIFAR-100, Fashion-MNIST and EMNIST, read by torchvision."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.config.sections import Settings
from knnper.config.torchvision_import import import_torchvision
from knnper.data.cache import cache_root, cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.cifar100_labels import COARSE_OF
from knnper.data.dataset import Dataset
from knnper.data.official_files import MissingFilesError, OfficialFiles, unpacked


@dataclass(frozen=True)
class DownloadSettings(Settings):
    """Where the official files are.

    Attributes
    ----------
    root
        The folder that torchvision keeps the files in; null is ``downloads`` in the
        cache folder.
    download
        Whether the files may be downloaded when they are missing.
    """

    root: str | None = None
    download: bool = False

    def folder(self) -> Path:
        """Return the absolute ``root``."""
        if self.root is None:
            return cache_root() / "downloads"
        return Path(self.root).expanduser().absolute()


@dataclass(frozen=True)
class EmnistSettings(DownloadSettings):
    """Where the official files are, and which of EMNIST's six data sets is meant.

    Attributes
    ----------
    split
        ``balanced`` and ``bymerge`` have 47 classes, ``byclass`` 62, ``letters`` 26,
        ``digits`` and ``mnist`` 10 (Cohen et al., 2017).
    """

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = (
        "balanced"
    )


def load_cifar10(settings: DownloadSettings) -> Dataset:
    """Return CIFAR-10: 50,000 and 10,000 images of shape (32, 32, 3), ten classes.

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("cifar10", "CIFAR10", settings)


def load_cifar100(settings: DownloadSettings) -> Dataset:
    """Return CIFAR-100 with its 20 coarse labels, images of shape (32, 32, 3).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("cifar100", "CIFAR100", settings, coarse_of=COARSE_OF)


def load_fashion_mnist(settings: DownloadSettings) -> Dataset:
    """Return Fashion-MNIST: 60,000 and 10,000 images of shape (28, 28, 1).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return _load("fashion_mnist", "FashionMNIST", settings)


def load_emnist(settings: EmnistSettings) -> Dataset:
    """Return one of EMNIST's data sets, images upright, of shape (28, 28, 1).

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """

    def build(writer: EntryWriter) -> Contents:
        # The official files hold the images mirrored along the diagonal.
        class_names = _write_splits(
            writer,
            "EMNIST",
            settings,
            orient=lambda images: images.transpose(0, 2, 1, 3),
            first_label=1 if settings.split == "letters" else 0,
            split=settings.split,
        )
        return Contents(class_names)

    source = {**_source(settings), "split": settings.split}
    return cached_dataset("emnist", source, build)


def _load(
    name: str,
    class_name: str,
    settings: DownloadSettings,
    coarse_of: tuple[int, ...] | None = None,
) -> Dataset:
    def build(writer: EntryWriter) -> Contents:
        return Contents(_write_splits(writer, class_name, settings), coarse_of)

    return cached_dataset(name, _source(settings), build)


def _source(settings: DownloadSettings) -> dict[str, str]:
    """Name the official files; what they hold never changes."""
    return {"root": str(settings.folder())}


def _write_splits(
    writer: EntryWriter,
    class_name: str,
    settings: DownloadSettings,
    *,
    orient: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = lambda images: images,
    first_label: int = 0,
    **arguments: str,
) -> tuple[str, ...]:
    """Store both splits of a torchvision data set; return its class names."""
    splits: tuple[Split, ...] = ("train", "test")
    with _readable(class_name, settings, **arguments) as root:
        for split in splits:
            found = _open(class_name, root, train=split == "train", **arguments)
            images = np.asarray(found.data, dtype=np.uint8)
            writer.put_images(split, orient(images.reshape(*images.shape[:3], -1)))
            writer.put_labels(split, np.asarray(found.targets) - first_label)
    return tuple(found.classes[first_label:])


@contextlib.contextmanager
def _readable(
    class_name: str, settings: DownloadSettings, **arguments: str
) -> Iterator[Path]:
    """Yield where torchvision can read; download the files first if that is asked."""
    folder = settings.folder()
    files = _files_of(_type_of(class_name), **arguments)
    with contextlib.ExitStack() as stack:
        try:
            root = stack.enter_context(unpacked(files, folder))
        except MissingFilesError:
            if not settings.download:
                raise
            _open(class_name, folder, train=True, download=True, **arguments)
            root = folder
        yield root


def _files_of(kind: Any, split: str = "") -> OfficialFiles:
    """Return the official files of a data set, as its class in torchvision says."""
    if hasattr(kind, "base_folder"):
        listed = [*kind.train_list, *kind.test_list]
        return OfficialFiles(
            kind.__name__,
            folder=kind.base_folder,
            names=(*(name for name, _ in listed), kind.meta["filename"]),
            downloads=(kind.filename,),
            url=kind.url,
            archive=kind.filename,
        )
    folder = f"{kind.__name__}/raw"
    if split:
        archive = Path(kind.url).name
        names = (
            f"emnist-{split}-{half}-{what}-ubyte"
            for half in ("train", "test")
            for what in ("images-idx3", "labels-idx1")
        )
        return OfficialFiles(
            kind.__name__, folder, tuple(names), (archive,), kind.url, archive, "gzip"
        )
    packed = dict(kind.resources)
    names = (name.removesuffix(".gz") for name in packed)
    return OfficialFiles(
        kind.__name__, folder, tuple(names), (*packed,), kind.mirrors[0], md5=packed
    )


def _type_of(class_name: str) -> Any:
    return getattr(import_torchvision().datasets, class_name)


def _open(class_name: str, root: Path, **arguments: Any) -> Any:
    try:
        return _type_of(class_name)(str(root), **arguments)
    except (RuntimeError, OSError, ValueError, TypeError, AssertionError) as error:
        downloading = arguments.get("download", False)
        advice = "check the connection, or " if downloading else ""
        raise DataError(
            f"{class_name} cannot be read from {root}: {error}; {advice}place the "
            "official files there"
        ) from error
