"""FEMNIST and Shakespeare of LEAF, from its files or the Hugging Face Hub."""

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knnper.data.cache import (
    CENTRAL_SPLITS,
    CentralSplit,
    DatasetContents,
    EntryWriter,
    cached_dataset,
)
from knnper.data.characters import CHARACTER_NAMES, UnknownCharacters
from knnper.data.dividing import (
    DividingSettings,
    clean_name,
    mark_tested,
    warn_of_merged,
)
from knnper.data.examples import DataFormat, Dataset
from knnper.data.hub import download_folder
from knnper.data.leaf_files import (
    PIXELS_SHAPE,
    Decode,
    LeafFiles,
    User,
    decode_images,
    decode_text,
    find_leaf_files,
    read_users,
)
from knnper.errors import DataError
from knnper.process import import_extra

_LOG = logging.getLogger(__name__)
Part = tuple[CentralSplit, User]
"""Training or test samples of one user."""
WRITTEN_CHARACTERS = tuple(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)
_NAME_ON_HUB = "flwrlabs/femnist"


@dataclass(frozen=True, kw_only=True)
class LeafSettings(DividingSettings, DataFormat):
    """Settings of LEAF's FEMNIST: the files and the split.

    Attributes
    ----------
    root
        Output folder of LEAF. It contains ``train`` and ``test``, whose split is used
        unchanged, or ``all_data``, which is split by the other settings. The parent
        with a folder ``data``, and ``all_data`` itself, are accepted, too.
    """

    name = "leaf_femnist"
    title = "FEMNIST (LEAF)"
    summary = "EMNIST by writer, from LEAF's files: 3,550 writers, 62 classes"

    root: str

    def load(self) -> Dataset:
        """Load images of shape (28, 28, 1) in 62 classes, by writer; or windows.

        Raises a `DataError` with the file and the user that are damaged or
        inconsistent.
        """
        files = find_leaf_files(Path(self.root).expanduser().absolute())
        source: dict[str, str | int | float] = {"files": files.fingerprint()}
        if files.whole:
            source.update(asdict(self))
            del source["root"]
        else:
            _warn_of_unused(self, files.root)
        return cached_dataset(
            self.name, source, lambda writer: self._write(writer, files)
        )

    def _write(self, writer: EntryWriter, files: LeafFiles) -> DatasetContents:
        names = write_parts(writer, _read_parts(files, decode_images, self))
        return DatasetContents(WRITTEN_CHARACTERS, client_names=names)


@dataclass(frozen=True, kw_only=True)
class LeafTextSettings(LeafSettings):
    """Settings of LEAF's Shakespeare: the files and the split of each role.

    Attributes
    ----------
    split
        ``time`` tests on the last windows, ``random`` on random windows (as in the
        paper); these overlap with training windows.
    """

    name = "leaf_shakespeare"
    title = "Shakespeare (LEAF)"
    summary = "the next character, by speaking role, from LEAF's files"

    split: Literal["random", "time"] = "time"

    def _write(self, writer: EntryWriter, files: LeafFiles) -> DatasetContents:
        """Store windows of 80 characters by speaking role."""
        unknown = UnknownCharacters()
        decode = functools.partial(decode_text, unknown=unknown)
        names = write_parts(writer, _read_parts(files, decode, self))
        unknown.require_few(self.root)
        return DatasetContents(CHARACTER_NAMES, dtype="token", client_names=names)


def write_parts(writer: EntryWriter, parts: Iterable[Part]) -> tuple[str, ...]:
    """Store the parts; return the users with samples in the order of arrival."""
    numbers: dict[str, int] = {}
    filled: set[CentralSplit] = set()
    written: set[str] = set()
    for split, user in parts:
        if len(user.labels):
            written.add(user.name)
            number = numbers.setdefault(clean_name(user.name), len(numbers))
            writer.append_of_client(split, user.inputs, user.labels, number)
            filled.add(split)
    missing = [split for split in CENTRAL_SPLITS if split not in filled]
    if missing:
        raise DataError(
            f"found no samples for {', '.join(missing)}; lower data.min_samples, "
            "change data.test_fraction, or give more data"
        )
    warn_of_merged(written, "clients", "data.root")
    return tuple(numbers)


def divide_users(users: Iterable[User], settings: DividingSettings) -> Iterator[Part]:
    """Yield the training and test samples of each user."""
    for user in users:
        if len(user.labels) < settings.min_samples:
            continue
        is_test = mark_tested(len(user.labels), user.name, settings)
        yield "train", user.take(~is_test)
        yield "test", user.take(is_test)


def _warn_of_unused(settings: LeafSettings, root: Path) -> None:
    unused = [
        f"data.{field.name}"
        for field in fields(settings)
        if field.name != "root" and getattr(settings, field.name) != field.default
    ]
    if unused:
        _LOG.warning(
            "%s contains train and test, which are used unchanged, so %s has no "
            "effect; to split the data differently, set data.root to all_data",
            root,
            ", ".join(unused),
        )


def _read_parts(
    files: LeafFiles, decode: Decode, settings: DividingSettings
) -> Iterator[Part]:
    if files.whole:
        yield from divide_users(_read_all_users(files.whole, decode), settings)
    for split, paths in files.divided.items():
        for user in _read_all_users(paths, decode):
            yield split, user


def _read_all_users(paths: Iterable[Path], decode: Decode) -> Iterator[User]:
    """Yield the users of all files; raise if a user has samples in two files."""
    found_in: dict[str, Path] = {}
    for path in paths:
        for user in read_users(path, decode):
            if user.name in found_in and len(user.labels):
                raise DataError(
                    f"user {user.name!r} is in {found_in[user.name]} and again in "
                    f"{path}; remove the copy, or join its samples in one file"
                )
            if len(user.labels):
                found_in[user.name] = path
            yield user


@dataclass(frozen=True, kw_only=True)
class FemnistHubSettings(DividingSettings, DataFormat):
    """Settings of FEMNIST from the Hub: the download folder and the split.

    Attributes
    ----------
    root
        Folder of the downloaded files; null is ``downloads`` in the cache folder.
    """

    name = "femnist_hub"
    title = "FEMNIST (Hub)"
    summary = "the same, downloaded from the Hugging Face Hub through flwr-datasets"

    root: str | None = None

    def load(self) -> Dataset:
        """Load FEMNIST: images of shape (28, 28, 1) in 62 classes, by writer.

        Downloads 814,277 images unless they are in ``root``. Raises a `DataError` if
        that fails or the package flwr-datasets is missing.
        """

        def build(writer: EntryWriter) -> DatasetContents:
            users = _group_by_writer(_all_rows(download_folder(self.root)))
            names = write_parts(writer, divide_users(users, self))
            return DatasetContents(WRITTEN_CHARACTERS, client_names=names)

        # The content does not depend on the download folder.
        source = asdict(self)
        del source["root"]
        return cached_dataset("femnist_hub", source, build)


def _all_rows(folder: Path) -> Any:
    """Load the table with the columns image, writer_id and character."""
    package = import_extra("flwr_datasets", "hub", "femnist_hub")
    try:
        # Without shuffling, the rows of a writer are adjacent and fast to read.
        federated = package.FederatedDataset(
            dataset=_NAME_ON_HUB, partitioners={}, shuffle=False, cache_dir=str(folder)
        )
        return federated.load_split("train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{_NAME_ON_HUB} cannot be loaded into {folder}: {error}; check the "
            "connection, or give LEAF's own files to leaf_femnist"
        ) from error


def _group_by_writer(rows: Any) -> Iterator[User]:
    """Yield the writers in the order of their names, each with all of its images."""
    names, owner = np.unique(np.array(rows["writer_id"][:]), return_inverse=True)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    for name, places in zip(names, np.split(by_owner, ends[:-1]), strict=True):
        columns = rows[places.tolist()]
        images = [np.asarray(image.convert("L")) for image in columns["image"]]
        yield User(
            str(name),
            np.stack(images).reshape(-1, *PIXELS_SHAPE),
            np.asarray(columns["character"], dtype=np.int64),
        )
