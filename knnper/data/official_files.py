"""A data set's official files, packed as they are downloaded or unpacked."""

import contextlib
import gzip
import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from knnper.config.errors import DataError

_Source = IO[bytes] | gzip.GzipFile
_DAMAGED = (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


class MissingFilesError(DataError):
    """Some of the files are in none of the places where they may be."""


@dataclass(frozen=True)
class OfficialFiles:
    """The files of a data set that torchvision reads, and how they come.

    Attributes
    ----------
    title
        torchvision's name of the data set.
    folder
        Where torchvision looks for the files, below the root.
    names
        Of the files, unpacked. Packed by itself, each has ``.gz`` at its end.
    downloads
        The names of what is to be downloaded.
    url
        Where from.
    archive
        The one among ``downloads`` that holds all of them; None where each comes by
        itself.
    inside
        The folder that the archive unpacks to, where that is not torchvision's.
    md5
        Of files that are packed by themselves, in hexadecimal, where another data set
        has files of the same name.
    """

    title: str
    folder: str
    names: tuple[str, ...]
    downloads: tuple[str, ...]
    url: str
    archive: str | None = None
    inside: str = ""
    md5: Mapping[str, str] = field(default_factory=dict)

    def places(self, root: Path) -> list[Path]:
        """Return the folders where the files may be, that of torchvision first."""
        folder = Path(self.folder)
        below = [folder, *folder.parents[:-1], Path("raw"), Path()]
        inside = [self.inside] if self.inside else []
        return [root / one / more for one in below for more in ("", *inside)]


@contextlib.contextmanager
def unpacked(files: OfficialFiles, root: Path) -> Iterator[Path]:
    """Yield a root where torchvision finds the files; nothing in ``root`` is changed.

    Parameters
    ----------
    files
        Of a data set.
    root
        The folder that the user named. The files may be in torchvision's place below
        it, in ``raw`` or in itself, packed or not.

    Raises
    ------
    MissingFilesError
        If one is nowhere; with the places, and what to download.
    DataError
        If one is damaged, or that of another data set.
    """
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
