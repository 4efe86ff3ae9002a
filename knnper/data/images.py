"""Scikit-learn's digits in four domains: small images for clients of domains."""

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.builtin import CLASS_NAMES, digit_images
from knnper.data.cache import Contents, EntryWriter, Split, cached_dataset
from knnper.data.examples import Dataset
from knnper.data.images_base import (
    FolderListing,
    FoundFile,
    ImageForm,
    digest_of,
    files_below,
    folder_names,
    list_folder,
    write_images,
)
from knnper.data.tables import values_in_order
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, PositiveInt, ProperFraction, Settings
from knnper.seeding import RandomKey

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


Images = NDArray[np.uint8]

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class DigitDomainsSettings(Settings):
    """How many are test images, and which ones are in which domain.

    Attributes
    ----------
    test_fraction
        Part of each domain that is tested on, (0, 1), about: the same number of images
        of every class, but at most half of those that a class has. 0.15 in
        fedbasis-pflbed.txt, section 5.
    seed
        Of the domains and of the test images.
    """

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0


def load_digit_domains(settings: DigitDomainsSettings) -> Dataset:
    """Return the 1,797 digits, images of shape (8, 8, 1), each in one of `DOMAINS`.

    Every class is shared out evenly among the domains. In each of them a test split
    is set apart in which all classes count the same.
    """
    source = {"test_fraction": settings.test_fraction, "seed": settings.seed}
    return cached_dataset(
        "digit_domains", source, lambda writer: _digit_domains_build(writer, settings)
    )


def _as_they_are(images: Images) -> Images:
    return images


def _inverted(images: Images) -> Images:
    return 255 - images


def _rotated(images: Images) -> Images:
    """Turn by 90 degrees, against the clock."""
    return np.rot90(images, axes=(1, 2))


def _blurred(images: Images) -> Images:
    """Replace every pixel by the mean of the nine around it; edges are repeated."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    blurred: Images = np.rint(windows.mean(axis=(-2, -1))).astype(np.uint8)
    return blurred


DOMAINS: Mapping[str, Callable[[Images], Images]] = MappingProxyType(
    {
        "plain": _as_they_are,
        "inverted": _inverted,
        "rotated": _rotated,
        "blurred": _blurred,
    }
)
"""By name what a domain makes of images, uint8 of shape (n, height, width, 1)."""


def domains_of(labels: Integers, key: RandomKey) -> Integers:
    """Share out every class evenly among the domains.

    Parameters
    ----------
    labels
        Shape (n,).
    key
        Fixes who gets which.

    Returns
    -------
    Positions in `DOMAINS`, shape (n,).
    """
    shuffled = [
        key.child(label).numpy().permutation(np.flatnonzero(labels == label))
        for label in np.unique(labels).tolist()
    ]
    domain_of = np.empty(len(labels), dtype=np.int64)
    domain_of[np.concatenate(shuffled)] = np.arange(len(labels)) % len(DOMAINS)
    return domain_of


def _digit_domains_build(
    writer: EntryWriter, settings: DigitDomainsSettings
) -> Contents:
    images, labels = digit_images()
    key = RandomKey(settings.seed, ("digit_domains",))
    domain_of = domains_of(labels, key.child("domain"))
    made = _in_domains(images, domain_of)
    is_test = _test_mask(labels, domain_of, settings.test_fraction, key.child("test"))
    splits: tuple[tuple[Split, NDArray[np.bool_]], ...] = (
        ("train", ~is_test),
        ("test", is_test),
    )
    for split, chosen in splits:
        writer.put_images(split, made[chosen])
        writer.put_labels(split, labels[chosen])
        writer.put_domain_ids(split, domain_of[chosen])
    return Contents(CLASS_NAMES, domain_names=tuple(DOMAINS))


def _in_domains(images: Images, domain_of: Integers) -> Images:
    """Return each image as its domain makes it."""
    made = images.copy()
    for domain, make in enumerate(DOMAINS.values()):
        places = domain_of == domain
        made[places] = make(images[places])
    return made


def _test_mask(
    labels: Integers, domain_of: Integers, fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Mark a part of each domain, of every class the same number."""
    mask = np.zeros(len(labels), dtype=np.bool_)
    for domain, name in enumerate(DOMAINS):
        places = np.flatnonzero(domain_of == domain)
        kinds = [CLASS_NAMES[label] for label in labels[places]]
        mask[places] = balanced_part(kinds, fraction, key.child(name))
    return mask


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
        "image_folder",
        source,
        lambda writer: _image_folder_build(writer, listing, settings),
    )


def _image_folder_build(
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


Name = Annotated[str, Field(min_length=1)]

_FOLDERS_DEEP = 3


@dataclass(frozen=True)
class UserCsvSettings(Settings):
    """Which lists, what their columns mean, and where the images are.

    Attributes
    ----------
    train
        A CSV file with a header; a row is an image of a user.
    root
        The folder of the images: ``a/b/c/abcdef.jpg`` or ``abcdef.jpg`` for the image
        ``abcdef``.
    test
        Another such file, which may lack users; null takes `test_fraction` of each
        user's images in `train`.
    user_column, image_column, class_column
        What the columns are called.
    suffix
        What follows an image's name.
    image_size
        Height and width that every image is resized to, in pixels; null keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    test_fraction, seed
        Part of each user's images that is tested on where there is no list of them,
        and what chooses these; a user's only image is not.
    """

    train: str
    root: str
    test: str | None = None
    user_column: Name = "user_id"
    image_column: Name = "image_id"
    class_column: Name = "class"
    suffix: str = ".jpg"
    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    test_fraction: ProperFraction = 0.2
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class _Row:
    """One image: whose it is, if the list says so, its name, its class, its place."""

    user: str | None
    image: str
    class_name: str
    listed_in: Path
    line: int

    @property
    def where(self) -> str:
        """The list and the line in it, for messages."""
        return f"{self.listed_in}, line {self.line}"


@dataclass(frozen=True)
class _File:
    """Where an image is, what tells a change of it, and what it is by any name."""

    path: str
    num_bytes: int
    modified_ns: int
    device_and_number: tuple[int, int]


Lists = dict[Split, list[_Row]]


def load_user_csv(settings: UserCsvSettings) -> Dataset:
    """Return the images that the lists name, with the user of each.

    The user splits of Google Landmarks v2 are such lists: Hsu, Qi, Brown, "Federated
    Visual Classification with Real-World Data Distribution", ECCV 2020. The classes are
    those of ``train``, in the order of their names, or of their numbers where all are
    whole numbers.

    Raises
    ------
    DataError
        If a list cannot be read, lacks a column or a value or has one too many, or
        names an image that is not there; if two lines name one image; if test images
        have classes that no training image has; if an image cannot be read, or the
        sizes differ while ``image_size`` is null.
    """
    listed = _read(settings.train, settings, needs_user=True)
    class_names = values_in_order(row.class_name for row in listed)
    rows = _splits(listed, settings)
    _require_known_classes(rows, class_names)
    files = {split: _files(part, settings) for split, part in rows.items()}
    _require_each_once(rows, files)
    _require_tested(rows)
    source = {
        "rows": _digest(rows, files),
        "image_size": settings.image_size,
        "channels": settings.channels,
    }

    def build(writer: EntryWriter) -> Contents:
        paths = {split: [file.path for file in part] for split, part in files.items()}
        write_images(writer, paths, ImageForm(settings.image_size, settings.channels))
        _put_rows(writer, rows, class_names)
        return Contents(class_names)

    return cached_dataset("user_csv", source, build)


def _read(file: str, settings: UserCsvSettings, *, needs_user: bool) -> list[_Row]:
    path = Path(file).expanduser().absolute()
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(stream)
            columns = {settings.image_column, settings.class_column}
            columns |= {settings.user_column} if needs_user else set()
            _require_columns(path, table.fieldnames or (), columns)
            rows = [_row(path, table.line_num, one, settings) for one in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a CSV file: {error}") from error
    if not rows:
        raise DataError(f"{path} lists no images; add some")
    return rows


def _require_columns(path: Path, found: Sequence[str], needed: set[str]) -> None:
    missing = sorted(needed - set(found))
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)}, found "
            f"{', '.join(found) or 'nothing'}; name the "
            "columns in data.user_column, image_column and class_column"
        )
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise DataError(
            f"{path} has more than one column {', '.join(map(repr, twice))}; expected "
            "each name once, rename or remove the others"
        )


def _row(
    path: Path, line: int, found: dict[str | Any, str | Any], settings: UserCsvSettings
) -> _Row:
    surplus = found.pop(None, ())
    if surplus:
        raise DataError(
            f"{path}, line {line}: found {len(found) + len(surplus)} values, expected "
            f"{len(found)}; quote values that hold a comma"
        )
    user = found.get(settings.user_column)
    image, class_name = found[settings.image_column], found[settings.class_column]
    if not image or not class_name or (settings.user_column in found and not user):
        raise DataError(
            f"{path}, line {line}: a user, an image or a class is missing; fill it in, "
            "or leave the line out"
        )
    if PurePath(image).is_absolute() or ".." in PurePath(image).parts:
        raise DataError(
            f"{path}, line {line}: found the image {image!r}, expected a name below "
            "data.root, without '..' in it"
        )
    return _Row(user, image, class_name, path, line)


def _splits(listed: list[_Row], settings: UserCsvSettings) -> Lists:
    if settings.test is not None:
        test = _read(settings.test, settings, needs_user=False)
        return {"train": listed, "test": test}
    tested = _held_out(listed, settings)
    return {
        "train": [row for place, row in enumerate(listed) if place not in tested],
        "test": [row for place, row in enumerate(listed) if place in tested],
    }


def _held_out(listed: list[_Row], settings: UserCsvSettings) -> set[int]:
    """Return the places of the rows that are tested on, some of each user's."""
    places_of: dict[str, list[int]] = {}
    for place, row in enumerate(listed):
        places_of.setdefault(str(row.user), []).append(place)
    key = RandomKey(settings.seed).child("user test")
    tested: set[int] = set()
    for user, places in places_of.items():
        count = min(int(settings.test_fraction * len(places) + 0.5), len(places) - 1)
        shuffled = key.child(user).numpy().permutation(places)
        tested.update(shuffled[:count].tolist())
    return tested


def _require_known_classes(rows: Lists, class_names: Sequence[str]) -> None:
    unknown = {row.class_name for row in rows["test"]} - set(class_names)
    if unknown:
        raise DataError(
            "test images have classes that no training image has: "
            f"{', '.join(sorted(unknown))}; the classes are those of data.train"
        )


def _require_each_once(rows: Lists, files: dict[Split, list[_File]]) -> None:
    """Refuse two lines that are one image, which might be trained and tested on."""
    first_of: dict[tuple[int, int], _Row] = {}
    for split, part in rows.items():
        for row, file in zip(part, files[split], strict=True):
            first = first_of.setdefault(file.device_and_number, row)
            if first is not row:
                raise DataError(
                    f"{row.where}: {file.path} is also the image in {first.where}, "
                    "expected each image once in all lists; leave out one of the lines"
                )


def _require_tested(rows: Lists) -> None:
    if not rows["test"]:
        raise DataError(
            "there are no images to test on; raise data.test_fraction, of which a "
            "user's only image is never taken, or list some in data.test"
        )


def _files(rows: Sequence[_Row], settings: UserCsvSettings) -> list[_File]:
    root = Path(settings.root).expanduser().absolute()
    return [_file(root, row, settings.suffix) for row in rows]


def _file(root: Path, row: _Row, suffix: str) -> _File:
    name = f"{row.image}{suffix}"
    flat, letters = root / name, name[:_FOLDERS_DEEP]
    # A slash among the letters would be the root of all folders.
    nested = flat if "/" in letters else root.joinpath(*letters, name)
    for path in (nested, flat):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise DataError(
                f"{row.where}: the image {row.image!r} cannot be looked up: {error}"
            ) from error
        number = (status.st_dev, status.st_ino)
        return _File(str(path), status.st_size, status.st_mtime_ns, number)
    raise DataError(
        f"{row.where}: there is neither {nested} nor {flat}; correct data.root or "
        "data.suffix, or leave the image out of the list"
    )


def _digest(rows: Lists, files: dict[Split, list[_File]]) -> str:
    digest = hashlib.sha256()
    for split, part in rows.items():
        for row, file in zip(part, files[split], strict=True):
            # A device may have another number after a restart.
            state = (file.path, file.num_bytes, file.modified_ns)
            line = (split, row.user, row.class_name, *state)
            digest.update(f"{line!r}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _put_rows(writer: EntryWriter, rows: Lists, class_names: Sequence[str]) -> None:
    users = values_in_order(
        row.user for part in rows.values() for row in part if row.user is not None
    )
    number_of = {user: number for number, user in enumerate(users)}
    label_of = {name: label for label, name in enumerate(class_names)}
    for split, part in rows.items():
        writer.put_labels(split, [label_of[row.class_name] for row in part])
        owners = [number_of[row.user] for row in part if row.user is not None]
        if len(owners) == len(part):
            writer.put_client_ids(split, owners)
