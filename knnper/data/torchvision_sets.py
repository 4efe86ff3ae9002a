"""Data sets whose official files torchvision reads, such as CIFAR's."""

import contextlib
import gzip
import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from knnper.data.cache import Contents, EntryWriter, Split, cache_root, cached_dataset
from knnper.data.examples import DataFormat, Dataset
from knnper.errors import DataError
from knnper.process import import_torchvision

# Position: fine label in alphabetical order (apple is 0); value: superclass in
# alphabetical order (aquatic_mammals is 0). Krizhevsky (2009); the
# same as `coarse_labels` in the official files.
COARSE_OF: tuple[int, ...] = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
    6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip


_Source = IO[bytes] | gzip.GzipFile

_DAMAGED = (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


class MissingFilesError(DataError):
    """Some of the files are in none of the places where they may be."""


@dataclass(frozen=True)
class OfficialFiles:
    """The files of a data set that torchvision reads, and how they come."""

    title: str  # torchvision's name of the data set
    folder: str  # where torchvision looks for the files, below the root
    # Of the files, unpacked. Packed by itself, each has ``.gz`` at its end.
    names: tuple[str, ...]
    downloads: tuple[str, ...]  # the names of what is to be downloaded
    url: str  # where from
    # The one among ``downloads`` that holds all of them; None where each comes by
    # itself.
    archive: str | None = None
    # The folder that the archive unpacks to, where that is not torchvision's.
    inside: str = ""
    # Of files that are packed by themselves, in hexadecimal, where another data set has
    # files of the same name.
    md5: Mapping[str, str] = field(default_factory=dict)

    def places(self, root: Path) -> list[Path]:
        """Return the folders where the files may be, that of torchvision first."""
        folder = Path(self.folder)
        below = [folder, *folder.parents[:-1], Path("raw"), Path()]
        inside = [self.inside] if self.inside else []
        return [root / one / more for one in below for more in ("", *inside)]


@contextlib.contextmanager
def unpacked(files: OfficialFiles, root: Path) -> Iterator[Path]:
    """Yield a root where torchvision finds the files; ``root`` is not changed."""
    if all((root / files.folder / name).is_file() for name in files.names):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="knnper-") as made:
        target = Path(made) / files.folder
        target.mkdir(parents=True)
        missing = [name for name in files.names if not _put(name, files, root, target)]
        if missing and files.archive:
            archive = _first(files.places(root), files.archive)
            missing = _extract(archive, missing, target) if archive else missing
        if missing:
            raise MissingFilesError(_told(missing, files, root))
        yield Path(made)


def _first(places: Iterable[Path], name: str) -> Path | None:
    return next((one / name for one in places if (one / name).is_file()), None)


def _put(name: str, files: OfficialFiles, root: Path, target: Path) -> bool:
    """Put a file that lies by itself into a folder; return whether there is one."""
    places = files.places(root)
    found = _first(places, name)
    if found is not None:
        (target / name).symlink_to(found.absolute())
        return True
    packed = _first(places, f"{name}.gz")
    if packed is None:
        return False
    _require_md5(packed, files.md5.get(packed.name))
    try:
        with gzip.open(packed) as source:
            _write(source, target / name)
    except _DAMAGED as error:
        raise DataError(_damaged(packed, error)) from error
    return True


def _require_md5(packed: Path, expected: str | None) -> None:
    if expected is None:
        return
    with packed.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != expected:
        raise DataError(
            f"{packed} is not the official file: expected MD5 {expected}, found "
            f"{found}. Other data sets have files of the same name; download it again, "
            "or unpack it there if you trust it"
        )


def _extract(archive: Path, names: Iterable[str], target: Path) -> list[str]:
    """Unpack files of an archive into a folder; return those that it does not have."""
    missing = set(names)
    try:
        for name, source in _members(archive):
            if name in missing:
                _write(source, target / name)
                missing.remove(name)
    except _DAMAGED as error:
        raise DataError(_damaged(archive, error)) from error
    return [name for name in names if name in missing]


def _members(archive: Path) -> Iterator[tuple[str, _Source]]:
    """Yield the files of an archive by the last part of their names, unpacked."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for path in zipped.namelist():
                with zipped.open(path) as file:
                    packed = path.endswith(".gz")
                    source = gzip.GzipFile(fileobj=file) if packed else file
                    yield Path(path).name.removesuffix(".gz"), source
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            held = tarred.extractfile(member)
            if held is not None:
                yield Path(member.name).name, held


def _write(source: _Source, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file)


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged: {error or type(error).__name__}; download it again"


def _told(missing: Iterable[str], files: OfficialFiles, root: Path) -> str:
    packed = files.archive or "each with .gz at its end"
    return (
        f"{files.title}: {', '.join(missing)} not found, neither unpacked nor packed "
        f"({packed}); looked in {', '.join(map(str, files.places(root)))}. Set "
        f"data.download=true, or download {', '.join(files.downloads)} from "
        f"{files.url} and place what you get in {root} as it is"
    )


@dataclass(frozen=True)
class DownloadSettings(DataFormat):
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

    name = "emnist"
    title = "EMNIST"
    summary = "handwritten letters and digits of 28x28 pixels, 10 to 62 classes"

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = (
        "balanced"
    )

    def load(self) -> Dataset:
        """Return one of EMNIST's data sets, images upright, of shape (28, 28, 1)."""

        def build(writer: EntryWriter) -> Contents:
            # The official files hold the images mirrored along the diagonal.
            class_names = _write_splits(
                writer,
                "EMNIST",
                self,
                orient=lambda images: images.transpose(0, 2, 1, 3),
                first_label=1 if self.split == "letters" else 0,
                split=self.split,
            )
            return Contents(class_names)

        source = {**_source(self), "split": self.split}
        return cached_dataset("emnist", source, build)


@dataclass(frozen=True)
class Cifar10Settings(DownloadSettings):
    """Where the official files are."""

    name = "cifar10"
    title = "CIFAR-10"
    summary = "60,000 colour photographs of 32x32 pixels, ten classes"

    def load(self) -> Dataset:
        """Return CIFAR-10: 60,000 images of shape (32, 32, 3), ten classes."""
        return _load("cifar10", "CIFAR10", self)


@dataclass(frozen=True)
class Cifar100Settings(DownloadSettings):
    """Where the official files are."""

    name = "cifar100"
    title = "CIFAR-100"
    summary = "60,000 colour photographs of 32x32 pixels, 100 classes in 20 groups"

    def load(self) -> Dataset:
        """Return CIFAR-100 with its 20 coarse labels, images of shape (32, 32, 3)."""
        return _load("cifar100", "CIFAR100", self, coarse_of=COARSE_OF)


@dataclass(frozen=True)
class FashionMnistSettings(DownloadSettings):
    """Where the official files are."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    summary = "70,000 grey pictures of clothes of 28x28 pixels, ten classes"

    def load(self) -> Dataset:
        """Return Fashion-MNIST: 60,000 and 10,000 images of shape (28, 28, 1)."""
        return _load("fashion_mnist", "FashionMNIST", self)


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
