"""Images of many users, listed in CSV files, as Google Landmarks is."""

import csv
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from knnper.data.cache import Contents, EntryWriter, Split
from knnper.data.dividing import numbered, require_known, values_in_order
from knnper.data.examples import Dataset
from knnper.data.images import DecodedSettings
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, ProperFraction
from knnper.seeding import RandomKey

Name = Annotated[str, Field(min_length=1)]
_FOLDERS_DEEP = 3


@dataclass(frozen=True)
class UserCsvSettings(DecodedSettings):
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
    test_fraction, seed
        Part of each user's images that is tested on where there is no list of them,
        and what chooses these; a user's only image is not.
    """

    name = "user_csv"
    title = "User CSV"
    summary = "images of many users, listed in CSV files, as Google Landmarks is"

    train: str
    root: str
    test: str | None = None
    user_column: Name = "user_id"
    image_column: Name = "image_id"
    class_column: Name = "class"
    suffix: str = ".jpg"
    test_fraction: ProperFraction = 0.2
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Return the images that the lists name, with the user of each.

        The user splits of Google Landmarks v2 are such lists: Hsu, Qi, Brown,
        "Federated Visual Classification with Real-World Data Distribution", ECCV 2020.
        The classes are those of ``train``, in the order of their names, or of their
        numbers where all are whole numbers.
        """
        listed = _read(self.train, self, needs_user=True)
        class_names = values_in_order(row.class_name for row in listed)
        rows = _splits(listed, self)
        tested = (row.class_name for row in rows["test"])
        require_known(tested, class_names, self.test or self.train)
        root = Path(self.root).expanduser().absolute()
        files = {
            split: [_file(root, row, self.suffix) for row in part]
            for split, part in rows.items()
        }
        _require_each_once(rows, files)
        if not rows["test"]:
            raise DataError(
                "there are no images to test on; raise data.test_fraction, of which a "
                "user's only image is never taken, or list some in data.test"
            )

        def describe(writer: EntryWriter) -> Contents:
            users = values_in_order(
                row.user for part in rows.values() for row in part if row.user
            )
            for split, part in rows.items():
                classes = (row.class_name for row in part)
                writer.put_labels(split, numbered(classes, class_names))
                owners = [row.user for row in part if row.user]
                if len(owners) == len(part):
                    writer.put_client_ids(split, numbered(owners, users))
            return Contents(class_names)

        paths = {split: [one.path for one in part] for split, part in files.items()}
        return self.decoded({"rows": _digest(rows, files)}, paths, describe)


class _Row(NamedTuple):
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


class _File(NamedTuple):
    """Where an image is, what tells a change of it, and what it is by any name."""

    path: str
    num_bytes: int
    modified_ns: int
    device_and_number: tuple[int, int]


Lists = dict[Split, list[_Row]]


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
    places_of = defaultdict[str, list[int]](list)
    for place, row in enumerate(listed):
        places_of[str(row.user)].append(place)
    key = RandomKey(settings.seed).child("user test")
    tested: set[int] = set()
    for user, places in places_of.items():
        count = min(int(settings.test_fraction * len(places) + 0.5), len(places) - 1)
        shuffled = key.child(user).numpy().permutation(places)
        tested.update(shuffled[:count].tolist())
    return {
        "train": [row for place, row in enumerate(listed) if place not in tested],
        "test": [row for place, row in enumerate(listed) if place in tested],
    }


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
