"""LEAF's data sets, from their files into the cache, one user at a time."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from knnper.config.errors import DataError
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.leaf.dividing import DividingSettings, mark_tested
from knnper.data.leaf.layout import LeafFiles, find_leaf_files
from knnper.data.leaf.samples import Decode, image_decoder, text_decoder
from knnper.data.leaf.user_file import User, read_users
from knnper.data.text.alphabet import CHARACTER_NAMES
from knnper.data.text.unknown import UnknownCharacters

_LOG = logging.getLogger(__name__)

Part = tuple[Split, User]
"""What one user trains on, or is tested on."""

WRITTEN_CHARACTERS = tuple(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)


@dataclass(frozen=True, kw_only=True)
class LeafSettings(DividingSettings):
    """Where the files are, and how they are divided.

    Attributes
    ----------
    root
        The folder that LEAF has filled: with ``train`` and ``test``, whose split is
        then taken as it is, or else with ``all_data``, which is divided as the other
        settings say. Its parent, in which it is called ``data``, will do, and so will
        ``all_data`` itself.
    """

    root: str


@dataclass(frozen=True, kw_only=True)
class LeafTextSettings(LeafSettings):
    """Where the files are, and how each role's windows are divided.

    Attributes
    ----------
    split
        ``time`` tests on the last windows, ``random`` on any, as in the paper: windows
        overlap, so that what is tested on is then trained on in part.
    """

    split: Literal["random", "time"] = "time"


def load_leaf_femnist(settings: LeafSettings) -> Dataset:
    """Return LEAF's FEMNIST: images of shape (28, 28, 1), 62 classes, by writer.

    Raises
    ------
    DataError
        If the files are missing, damaged or do not agree with themselves; the message
        names file and user.
    """

    def write(writer: EntryWriter, files: LeafFiles) -> Contents:
        write_parts(writer, _parts(files, image_decoder(), settings))
        return Contents(WRITTEN_CHARACTERS)

    return _load("leaf_femnist", settings, write)


def load_leaf_shakespeare(settings: LeafTextSettings) -> Dataset:
    """Return LEAF's Shakespeare: windows of 80 characters, by speaking role.

    Raises
    ------
    DataError
        As `load_leaf_femnist`; and if most labels are outside of the alphabet.
    """

    def write(writer: EntryWriter, files: LeafFiles) -> Contents:
        unknown = UnknownCharacters()
        write_parts(writer, _parts(files, text_decoder(unknown), settings))
        unknown.require_few(settings.root)
        return Contents(CHARACTER_NAMES, dtype="token")

    return _load("leaf_shakespeare", settings, write)


def write_parts(writer: EntryWriter, parts: Iterable[Part]) -> None:
    """Store each part; users are numbered as they come, those without samples not.

    Raises
    ------
    DataError
        If there is nothing to train on or nothing to test on.
    """
    numbers: dict[str, int] = {}
    found: set[Split] = set()
    for split, user in parts:
        if len(user.samples) == 0:
            continue
        number = numbers.setdefault(user.name, len(numbers))
        samples = user.samples
        writer.append_of_client(split, samples.inputs, samples.labels, number)
        found.add(split)
    missing = [split for split in ("train", "test") if split not in found]
    if missing:
        raise DataError(
            f"no user has samples for: {', '.join(missing)}; some are needed. Mind "
            "data.min_samples and data.test_fraction, or give more data"
        )


def divided(users: Iterable[User], settings: DividingSettings) -> Iterator[Part]:
    """Yield what each user trains on and is tested on."""
    for user in users:
        samples = user.samples
        if len(samples) < settings.min_samples:
            continue
        is_test = mark_tested(len(samples), user.name, settings)
        yield "train", User(user.name, samples.take(~is_test))
        yield "test", User(user.name, samples.take(is_test))


def _load(
    name: str,
    settings: LeafSettings,
    write: Callable[[EntryWriter, LeafFiles], Contents],
) -> Dataset:
    files = find_leaf_files(Path(settings.root).expanduser().absolute())
    source: dict[str, str | int | float] = {"files": files.fingerprint()}
    if files.whole:
        source.update(asdict(settings))
        del source["root"]
    else:
        _warn_of_unused(settings, files.root)
    return cached_dataset(name, source, lambda writer: write(writer, files))


def _warn_of_unused(settings: LeafSettings, root: Path) -> None:
    unused = [
        f"data.{field.name}"
        for field in fields(settings)
        if field.name != "root" and getattr(settings, field.name) != field.default
    ]
    if unused:
        _LOG.warning(
            "%s holds train and test, which are taken as they are: %s without effect; "
            "to divide the data anew, set data.root to all_data",
            root,
            ", ".join(unused),
        )


def _parts(
    files: LeafFiles, decode: Decode, settings: DividingSettings
) -> Iterator[Part]:
    if files.whole:
        yield from divided(_users(files.whole, decode), settings)
    for split, paths in files.divided.items():
        for user in _users(paths, decode):
            yield split, user


def _users(paths: Iterable[Path], decode: Decode) -> Iterator[User]:
    """Yield the users of all files; each may have samples only once."""
    found_in: dict[str, Path] = {}
    for path in paths:
        for user in read_users(path, decode):
            if user.name in found_in and len(user.samples):
                raise DataError(
                    f"user {user.name!r} is in {found_in[user.name]} and again in "
                    f"{path}; remove the copy, or join its samples in one file"
                )
            if len(user.samples):
                found_in[user.name] = path
            yield user
