"""Data sets read by torchvision from official files, such as CIFAR-10."""

import contextlib
import gzip
import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from knnper.data.cache import (
    CENTRAL_SPLITS,
    DatasetContents,
    EntryWriter,
    cached_dataset,
)
from knnper.data.examples import DataFormat, Dataset
from knnper.data.hub import download_folder
from knnper.errors import DataError
from knnper.process import import_torchvision

# Superclass of each of CIFAR-100's labels, both numbered in alphabetical order (apple
# and aquatic_mammals are 0). Krizhevsky (2009); `coarse_labels` in the official files.
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
    """Raised if some of the official files are in none of the searched folders."""


@dataclass(frozen=True)
class OfficialFiles:
    """The official files of a data set, and how they are packed."""

    title: str  # torchvision's name of the data set
    folder: str  # torchvision's folder of the files, below the root
    names: tuple[str, ...]  # unpacked; a file packed on its own ends with .gz
    downloads: tuple[str, ...]  # names of the downloads
    url: str  # of the downloads
    archive: str | None = None  # the download that contains all files, if there is one
    inside: str = ""  # folder in the archive, if it differs from torchvision's
    # By name of a .gz file, in hexadecimal: MNIST and Fashion-MNIST use the same names.
    md5: Mapping[str, str] = field(default_factory=dict)

    def find(self, root: Path, name: str) -> Path | None:
        """Find a file below ``root``, first in torchvision's folder."""
        files = (folder / name for folder in self.search_folders(root))
        return next((file for file in files if file.is_file()), None)

    def search_folders(self, root: Path) -> list[Path]:
        """Return the folders to search, torchvision's first."""
        folder = Path(self.folder)
        below = [folder, *folder.parents[:-1], Path("raw"), Path()]
        folders = (
            root / folder_below / inside
            for folder_below in below
            for inside in ("", self.inside)
        )
        return list(dict.fromkeys(folders))


@contextlib.contextmanager
def unpack_files(files: OfficialFiles, root: Path) -> Iterator[Path]:
    """Yield a root that torchvision can read; ``root`` itself is not changed."""
    if all((root / files.folder / name).is_file() for name in files.names):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="knnper-") as unpacked_root:
        target = Path(unpacked_root) / files.folder
        target.mkdir(parents=True)
        missing = [
            name for name in files.names if not _place_file(name, files, root, target)
        ]
        archive = files.find(root, files.archive) if files.archive else None
        if missing and archive is not None:
            missing = _extract(archive, missing, target)
        if missing:
            packed = files.archive or "each with .gz at its end"
            searched = ", ".join(map(str, files.search_folders(root)))
            raise MissingFilesError(
                f"{files.title}: {', '.join(missing)} not found, neither unpacked nor "
                f"packed ({packed}); looked in {searched}. Set data.download=true, or "
                f"download {', '.join(files.downloads)} from {files.url} and place "
                f"what you get in {root} as it is"
            )
        yield Path(unpacked_root)


def _place_file(name: str, files: OfficialFiles, root: Path, target: Path) -> bool:
    """Link or unpack a single file into ``target``; return False if it is missing."""
    if unpacked_file := files.find(root, name):
        (target / name).symlink_to(unpacked_file.absolute())
        return True
    packed = files.find(root, f"{name}.gz")
    if packed is None:
        return False
    if expected := files.md5.get(packed.name):
        with packed.open("rb") as file:
            md5 = hashlib.file_digest(file, "md5").hexdigest()
        if md5 != expected:
            raise DataError(
                f"{packed} is not the official file: expected MD5 {expected}, found "
                f"{md5}. Other data sets have files of the same name; download it "
                "again, or unpack it there if you trust it"
            )
    with _report_damage(packed), gzip.open(packed) as source:
        _copy_to_file(source, target / name)
    return True


def _extract(archive: Path, names: Iterable[str], target: Path) -> list[str]:
    """Unpack files of an archive into a folder; return the names that it lacks."""
    missing = list(names)
    with _report_damage(archive):
        for name, source in _members(archive):
            if name in missing:
                _copy_to_file(source, target / name)
                missing.remove(name)
    return missing


def _members(archive: Path) -> Iterator[tuple[str, _Source]]:
    """Yield the base name and the unpacked content of each file in an archive."""
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


def _copy_to_file(source: _Source, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file)


@contextlib.contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Turn errors of unpacking into a `DataError` that the file is damaged."""
    try:
        yield
    except _DAMAGED as error:
        reason = f"{error or type(error).__name__}; download it again"
        raise DataError(f"{path} is damaged: {reason}") from error


@dataclass(frozen=True)
class DownloadSettings(DataFormat):
    """Settings of the official files.

    Attributes
    ----------
    root
        torchvision's folder of the files; null is ``downloads`` in the cache folder.
    download
        Whether missing files may be downloaded.
    """

    official: ClassVar[str]  # its name in torchvision
    coarse_of: ClassVar[tuple[int, ...] | None] = None

    root: str | None = None
    download: bool = False

    def load(self) -> Dataset:
        """Load the official files; their content never changes."""
        source = {**asdict(self), "root": str(download_folder(self.root))}
        del source["download"]
        return cached_dataset(self.name, source, self._write)

    def _write(self, writer: EntryWriter) -> DatasetContents:
        return DatasetContents(_write_splits(writer, self), self.coarse_of)


@dataclass(frozen=True)
class EmnistSettings(DownloadSettings):
    """Settings of the official files, and the choice among EMNIST's six data sets.

    Attributes
    ----------
    split
        ``balanced`` and ``bymerge`` have 47 classes, ``byclass`` 62, ``letters`` 26,
        ``digits`` and ``mnist`` 10 (Cohen et al., 2017).
    """

    name = "emnist"
    title = "EMNIST"
    summary = "handwritten letters and digits of 28x28 pixels, 10 to 62 classes"
    official = "EMNIST"

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = (
        "balanced"
    )

    def _write(self, writer: EntryWriter) -> DatasetContents:
        # In the official files, rows and columns of the images are exchanged, and
        # letters are numbered from 1.
        class_names = _write_splits(
            writer,
            self,
            orient=lambda images: images.transpose(0, 2, 1, 3),
            first_label=1 if self.split == "letters" else 0,
            split=self.split,
        )
        return DatasetContents(class_names)


@dataclass(frozen=True)
class Cifar10Settings(DownloadSettings):
    """Settings of the official files."""

    name = "cifar10"
    title = "CIFAR-10"
    summary = "60,000 colour photographs of 32x32 pixels, ten classes"
    official = "CIFAR10"


@dataclass(frozen=True)
class Cifar100Settings(DownloadSettings):
    """Settings of the official files."""

    name = "cifar100"
    title = "CIFAR-100"
    summary = "60,000 colour photographs of 32x32 pixels, 100 classes in 20 groups"
    official = "CIFAR100"
    coarse_of = COARSE_OF


@dataclass(frozen=True)
class FashionMnistSettings(DownloadSettings):
    """Settings of the official files."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    summary = "70,000 grey pictures of clothes of 28x28 pixels, ten classes"
    official = "FashionMNIST"


@dataclass(frozen=True)
class MnistSettings(DownloadSettings):
    """Settings of the official files."""

    name = "mnist"
    title = "MNIST"
    summary = "70,000 handwritten digits of 28x28 pixels, ten classes"
    official = "MNIST"


def _write_splits(
    writer: EntryWriter,
    settings: DownloadSettings,
    *,
    orient: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = lambda images: images,
    first_label: int = 0,
    **arguments: str,
) -> tuple[str, ...]:
    """Store training and test data of a data set; return the names of its labels.

    Missing files are downloaded if the settings allow it. ``arguments`` of the class of
    torchvision choose among EMNIST's data sets.
    """
    torchvision_name = settings.official
    with contextlib.ExitStack() as stack:
        root = download_folder(settings.root)
        files = _files_of(_type_of(torchvision_name), **arguments)
        try:
            root = stack.enter_context(unpack_files(files, root))
        except MissingFilesError:
            if not settings.download:
                raise
            _open_torchvision(
                torchvision_name, root, train=True, download=True, **arguments
            )
        for split in CENTRAL_SPLITS:
            split_data = _open_torchvision(
                torchvision_name, root, train=split == "train", **arguments
            )
            images = np.asarray(split_data.data, dtype=np.uint8)
            writer.put_images(split, orient(images.reshape(*images.shape[:3], -1)))
            writer.put_labels(split, np.asarray(split_data.targets) - first_label)
    return tuple(split_data.classes[first_label:])


def _files_of(kind: Any, split: str = "") -> OfficialFiles:
    """Describe the official files of a data set by its class in torchvision."""
    title, folder = kind.__name__, f"{kind.__name__}/raw"
    if hasattr(kind, "base_folder"):
        listed = (*kind.train_list, *kind.test_list)
        names = (*(name for name, _ in listed), kind.meta["filename"])
        packed = kind.filename
        return OfficialFiles(
            title, kind.base_folder, names, (packed,), kind.url, archive=packed
        )
    if split:
        packed = Path(kind.url).name
        names = tuple(
            f"emnist-{split}-{half}-{kind_of_file}-ubyte"
            for half in ("train", "test")
            for kind_of_file in ("images-idx3", "labels-idx1")
        )
        return OfficialFiles(
            title, folder, names, (packed,), kind.url, archive=packed, inside="gzip"
        )
    md5 = dict(kind.resources)
    names = tuple(name.removesuffix(".gz") for name in md5)
    return OfficialFiles(title, folder, names, (*md5,), kind.mirrors[0], md5=md5)


def _type_of(class_name: str) -> Any:
    return getattr(import_torchvision().datasets, class_name)


def _open_torchvision(class_name: str, root: Path, **arguments: Any) -> Any:
    try:
        return _type_of(class_name)(str(root), **arguments)
    except (RuntimeError, OSError, ValueError, TypeError, AssertionError) as error:
        downloading = arguments.get("download", False)
        advice = "check the connection, or " if downloading else ""
        raise DataError(
            f"{class_name} cannot be read from {root}: {error}; {advice}place the "
            "official files there"
        ) from error
