"""Data sets of the papers' experiments, from archives on this machine.

Used as in ``data: {name: "papers.data:Cifar100Sheets", path: data/cifar100-webp.tar}``.
The path is the archive or its unpacked folder, which is read once into the cache.
Nothing is downloaded.
"""

import csv
import io
import re
import tarfile
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from knnper import DataError, DataFormat, Dataset, PositiveInt
from knnper.data.cache import (
    CentralSplit,
    DatasetContents,
    EntryWriter,
    cached_dataset,
    state_of_files,
)
from knnper.data.characters import (
    CHARACTER_NAMES,
    encode,
    target_positions,
    windows_before,
)
from knnper.data.dividing import DividingSettings, mark_tested, numbered
from knnper.data.images import EncodedImage, read_image, require_all_read, write_images
from knnper.data.leaf import WRITTEN_CHARACTERS, Part, write_parts
from knnper.data.leaf_files import WINDOW, User

Files = Mapping[str, bytes]
"""Contents of files by the last parts of their paths, sorted."""

_SPLITS: tuple[CentralSplit, ...] = ("train", "test")
_DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError)
_TILE = 32
Array = NDArray[Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class ArchiveSettings(DataFormat):
    """Settings of an archive.

    Attributes
    ----------
    path
        The archive or its unpacked folder.
    """

    patterns: ClassVar[tuple[str, ...]]  # of the files to read

    path: str

    def load(self) -> Dataset:
        """Load the data set in the archive."""
        place = Path(self.path).expanduser().absolute()
        unpacked = (file for form in self.patterns for file in place.rglob(form))
        paths = sorted(unpacked) if place.is_dir() else [place]
        source = {key: value for key, value in asdict(self).items() if key != "path"}
        source["files"] = state_of_files(paths, place.parent)

        def build(writer: EntryWriter) -> DatasetContents:
            advice = f"expected the archive of {self.title}, or the folder of its files"
            try:
                files = dict(sorted(self._files(place, paths)))
            except _DAMAGED as error:
                # The text of an OSError would repeat the path.
                why = getattr(error, "strerror", None) or error
                raise DataError(f"{place} cannot be read: {why}; {advice}") from error
            try:
                if not files:
                    raise KeyError(" or ".join(self.patterns))
                return self.build(writer, files)
            except KeyError as error:
                problem = f"{place}: found no {error.args[0]}"
                raise DataError(f"{problem}; {advice}") from error

        return cached_dataset(self.name, source, build)

    @abstractmethod
    def build(self, writer: EntryWriter, files: Files) -> DatasetContents:
        """Store the content of the files; raise a `KeyError` with a missing file."""

    def _files(self, place: Path, paths: list[Path]) -> Iterator[tuple[str, bytes]]:
        if place.is_dir():
            yield from ((self._name_of(path), path.read_bytes()) for path in paths)
            return
        with tarfile.open(place) as archive:
            for member in archive:
                name = self._name_of(PurePosixPath(member.name))
                held = archive.extractfile(member) if name else None
                if held is not None:
                    yield name, held.read()

    def _name_of(self, path: PurePath) -> str:
        """Return the last parts of a path, as many as its pattern has, or nothing."""
        depths = (
            pattern.count("/") for pattern in self.patterns if path.match(pattern)
        )
        return next(("/".join(path.parts[-1 - depth :]) for depth in depths), "")


@dataclass(frozen=True, kw_only=True)
class Cifar10Jpeg(ArchiveSettings):
    """CIFAR-10 as JPEG files ``train/CLASS/FILE.jpg`` and ``test/CLASS/FILE.jpg``.

    The arrays equal those of the format ``image_folder`` for the unpacked files.
    """

    name = "cifar10_jpeg"
    title = "CIFAR-10 (JPEG)"
    summary = "CIFAR-10 as JPEG copies with slightly different pixels"
    patterns = tuple(f"{split}/*/*.jpg" for split in _SPLITS)

    def build(self, writer: EntryWriter, files: Files) -> DatasetContents:
        """Store images of shape (32, 32, 3) in ten classes."""
        class_of = {name: name.split("/")[1] for name in files}
        class_names = tuple(sorted(set(class_of.values())))
        pictures: dict[CentralSplit, list[EncodedImage]] = {
            split: [
                EncodedImage(*image)
                for image in files.items()
                if image[0].startswith(split)
            ]
            for split in _SPLITS
        }
        failed = write_images(writer, pictures, None, 3)
        require_all_read(why for part in failed.values() for why in part.values())
        for split, part in pictures.items():
            labels = numbered((class_of[image.name] for image in part), class_names)
            writer.put_labels(split, labels)
        return DatasetContents(class_names)


@dataclass(frozen=True, kw_only=True)
class Cifar100Sheets(ArchiveSettings):
    """CIFAR-100 as sheets ``train/CLASS.webp``, ``test/CLASS.webp``, ``classes.csv``.

    A sheet contains all images of a class in rows. Pixels and the numbers of classes
    and coarse classes (for the partition ``pachinko``) are those of the official files;
    the order of the images differs.
    """

    name = "cifar100_sheets"
    title = "CIFAR-100 (sheets)"
    summary = "CIFAR-100, one lossless sheet of images a class"
    patterns = ("classes.csv", *(f"{split}/*.webp" for split in _SPLITS))

    def build(self, writer: EntryWriter, files: Files) -> DatasetContents:
        """Store images of shape (32, 32, 3) in 100 classes and 20 coarse classes."""
        table = csv.DictReader(files["classes.csv"].decode().splitlines())
        rows = sorted(table, key=lambda row: int(row["fine_id"]))
        for split in _SPLITS:
            names = [f"{split}/{row['fine']}.webp" for row in rows]
            sheets = [tiles(EncodedImage(name, files[name])) for name in names]
            writer.put_images(split, np.concatenate(sheets))
            labels = np.repeat(np.arange(len(sheets)), [len(sheet) for sheet in sheets])
            writer.put_labels(split, labels)
        coarse_of = tuple(int(row["coarse_id"]) for row in rows)
        return DatasetContents(tuple(row["fine"] for row in rows), coarse_of)


def tiles(sheet: EncodedImage) -> NDArray[np.uint8]:
    """Cut a sheet into its images, row by row, uint8 of shape (n, 32, 32, 3)."""
    pixels = read_image(sheet, 3)
    height, width, _ = pixels.shape
    if height % _TILE or width % _TILE:
        raise DataError(
            f"{sheet.name}: found a sheet of {width}x{height}, expected multiples of "
            f"{_TILE}: images of {_TILE}x{_TILE} side by side"
        )
    grid = pixels.reshape(height // _TILE, _TILE, width // _TILE, _TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, _TILE, _TILE, 3)


@dataclass(frozen=True, kw_only=True)
class WriterSettings(DividingSettings, ArchiveSettings):
    """Settings of images by writer: the file and the split of each writer's images."""

    class_names: ClassVar[tuple[str, ...]]

    def build(self, writer: EntryWriter, files: Files) -> DatasetContents:
        """Store images of shape (28, 28, 1) by writer."""
        (name,) = self.patterns
        try:
            with np.load(io.BytesIO(files[name]), allow_pickle=False) as archive:
                arrays = dict(archive)
        except (*_DAMAGED, ValueError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{name} cannot be read: {error}; download it again"
            ) from error
        client_names = write_parts(writer, self._parts(arrays))
        return DatasetContents(self.class_names, client_names=client_names)

    def flags(self, arrays: Arrays) -> Array | None:  # noqa: ARG002
        """Return 1 for each test image and 0 for others; None without a given split."""
        return None

    def _parts(self, arrays: Arrays) -> Iterator[Part]:
        owners = arrays["writer"]
        flags = self.flags(arrays)
        images = arrays["images"].astype(np.uint8)[..., None]
        labels = arrays["labels"].astype(np.int64)
        names = arrays.get("writer_ids")
        for owner in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == owner)
            name = str(owner if names is None else names[owner])
            if len(mine) < self.min_samples:
                continue
            is_test = mark_tested(len(mine), name, self)
            if flags is not None:
                is_test = flags[mine] == 1
            user = User(name, images[mine], labels[mine])
            yield "train", user.take(~is_test)
            yield "test", user.take(is_test)


@dataclass(frozen=True, kw_only=True)
class FemnistByWriter(WriterSettings):
    """FEMNIST of 300 of LEAF's writers, one client each.

    The writers are not a random sample: those with few images are over-represented.

    Attributes
    ----------
    leaf_split
        Use LEAF's split, with a tenth of each writer's images as test data, in place of
        the other settings.
    """

    name = "femnist_by_writer"
    title = "FEMNIST by writer"
    summary = "300 writers of LEAF's FEMNIST, 62 classes"
    patterns = ("femnist_by_writer.npz",)
    class_names = WRITTEN_CHARACTERS

    leaf_split: bool = True

    def flags(self, arrays: Arrays) -> Array | None:
        """Return LEAF's split if it is selected."""
        return arrays["leaf_test"] if self.leaf_split else None


@dataclass(frozen=True, kw_only=True)
class MnistByWriter(WriterSettings):
    """MNIST by writer, 836 clients.

    No writer is in both of MNIST's splits. The splits are joined, and a part of each
    writer's images becomes test data.
    """

    name = "mnist_by_writer"
    title = "MNIST by writer"
    summary = "MNIST's 70,000 digits by the writer of each"
    patterns = ("mnist_by_writer.npz",)
    class_names = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class ShakespeareByRole(ArchiveSettings):
    """Shakespeare by role, one client per ``by_play_and_character/PLAY_ROLE.txt``.

    Follows the code of Marfoq et al. 2022: a role's lines are joined by blanks, the
    last fifth of them (at least one) is test data, and no window contains characters of
    both parts (the paper states a random split). Roles without a window in either part
    are left out. Of LEAF's 1,145 roles, this leaves the 778 of the paper's Table 1,
    with 4,106,292 windows; the paper counts 4,226,158 samples.

    Attributes
    ----------
    stride
        Distance between predicted characters; 1 in LEAF.
    """

    name = "shakespeare_by_role"
    title = "Shakespeare by role"
    summary = "the next character, for 778 speaking roles, 80/20 in their order"
    patterns = ("by_play_and_character/*.txt",)

    stride: PositiveInt = 1

    def build(self, writer: EntryWriter, files: Files) -> DatasetContents:
        """Store windows of 80 characters by role."""
        names = write_parts(writer, self._parts(files))
        return DatasetContents(CHARACTER_NAMES, dtype="token", client_names=names)

    def _parts(self, files: Files) -> Iterator[Part]:
        for path, content in files.items():
            lines = re.sub("  +", " ", content.decode(errors="replace")).split("\n")[
                :-1
            ]
            # Rounded as in that code, where a fifth of ten lines is one line: 1 - 0.8 <
            # 0.2.
            num_trained = len(lines) - max(1, int((1 - 0.8) * len(lines)))
            trained, tested = lines[:num_trained], lines[num_trained:]
            ids = {"train": encode(" ".join(trained)), "test": encode(" ".join(tested))}
            if min(map(len, ids.values())) <= WINDOW:
                continue
            for split in _SPLITS:
                targets = target_positions(len(ids[split]), WINDOW, self.stride)
                windows = windows_before(ids[split], targets, WINDOW)
                labels = ids[split][targets].astype(np.int64)
                yield split, User(PurePosixPath(path).stem, windows, labels)
