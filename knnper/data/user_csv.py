"""Data sets of images of many users, listed in CSV files, as Google Landmarks is."""

import csv
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from knnper.data.cache import Contents, EntryWriter, Split
from knnper.data.csv_files import csv_problem, quote_problem
from knnper.data.dividing import (
    clean_name,
    numbered,
    require_known,
    values_in_order,
    warn_of_merged,
)
from knnper.data.examples import Dataset
from knnper.data.images import DecodedSettings
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, ProperFraction
from knnper.seeding import RandomKey

Name = Annotated[str, Field(min_length=1)]
_FOLDERS_DEEP = 3
_COMMAS = "write the file with commas in place of {!r}"


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
        class_names = values_in_order(one.class_name for one in listed)
        images = _splits(listed, self)
        tested = (one.class_name for one in images["test"])
        require_known(tested, class_names, self.test or self.train)
        everything = [*images["train"], *images["test"]]
        _require_each_once(everything)
        if not images["test"]:
            raise DataError(
                "there are no images to test on; raise data.test_fraction, of which a "
                "user's only image is never taken, or list some in data.test"
            )
        users = values_in_order(one.user for one in everything if one.user)

        def describe(writer: EntryWriter) -> Contents:
            for split, part in images.items():
                classes = (one.class_name for one in part)
                writer.put_labels(split, numbered(classes, class_names))
                owners = [one.user for one in part if one.user]
                if len(owners) == len(part):
                    writer.put_client_ids(split, numbered(owners, users))
            return Contents(class_names, client_names=users)

        paths = {split: [one.path for one in part] for split, part in images.items()}
        return self.decoded({"rows": _digest(images)}, paths, describe)


class _Image(NamedTuple):
    """One image: whose it is, if the list says so, its class, its line, its file."""

    user: str | None
    class_name: str
    where: str  # the list and the line in it, for messages
    path: str
    num_bytes: int
    modified_ns: int
    device_and_number: tuple[int, int]  # what it is by any name


Images = dict[Split, list[_Image]]


def _read(file: str, settings: UserCsvSettings, *, needs_user: bool) -> list[_Image]:
    path = Path(file).expanduser().absolute()
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(stream)
            needed = {settings.image_column, settings.class_column}
            needed |= {settings.user_column} if needs_user else set()
            _require_columns(path, table.fieldnames or (), needed)
            rows = [(f"{path}, line {table.line_num}", row) for row in table]
        if problem := quote_problem(path, ","):
            raise DataError(problem)
    except (DataError, OSError, UnicodeDecodeError, csv.Error) as error:
        reason = csv_problem(path, ",", _COMMAS) if path.is_file() else None
        if reason is None and isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} cannot be read as a CSV file: {reason or error}"
        ) from error
    if not rows:
        raise DataError(f"{path} lists no images; add some")
    columns = {"classes": settings.class_column, "clients": settings.user_column}
    for kind, column in columns.items():
        warn_of_merged((row.get(column) or "" for _, row in rows), kind, str(path))
    return [_image(where, row, settings) for where, row in rows]


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


def _image(
    where: str, row: dict[str | Any, str | Any], settings: UserCsvSettings
) -> _Image:
    surplus = row.pop(None, ())
    if surplus:
        raise DataError(
            f"{where}: found {len(row) + len(surplus)} values, expected {len(row)}; "
            "quote values that hold a comma"
        )
    user = row.get(settings.user_column)
    user = None if user is None else clean_name(user)
    image, class_name = row[settings.image_column], row[settings.class_column]
    class_name = clean_name(class_name or "")
    if not image or not class_name or (settings.user_column in row and not user):
        raise DataError(
            f"{where}: a user, an image or a class is missing; fill it in, or leave "
            "the line out"
        )
    if PurePath(image).is_absolute() or ".." in PurePath(image).parts:
        raise DataError(
            f"{where}: found the image {image!r}, expected a name below data.root, "
            "without '..' in it"
        )
    root = Path(settings.root).expanduser().absolute()
    name = f"{image}{settings.suffix}"
    flat, letters = root / name, name[:_FOLDERS_DEEP]
    # A slash among the letters would be the root of all folders.
    nested = flat if "/" in letters else root.joinpath(*letters, name)
    for path in (nested, flat):
        try:
            it = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise DataError(
                f"{where}: the image {image!r} cannot be looked up: {error}"
            ) from error
        state = (str(path), it.st_size, it.st_mtime_ns, (it.st_dev, it.st_ino))
        return _Image(user, class_name, where, *state)
    raise DataError(
        f"{where}: there is neither {nested} nor {flat}; correct data.root or "
        "data.suffix, or leave the image out of the list"
    )


def _splits(listed: list[_Image], settings: UserCsvSettings) -> Images:
    if settings.test is not None:
        test = _read(settings.test, settings, needs_user=False)
        return {"train": listed, "test": test}
    places_of = defaultdict[str, list[int]](list)
    for place, image in enumerate(listed):
        places_of[str(image.user)].append(place)
    key = RandomKey(settings.seed).child("user test")
    tested: set[int] = set()
    for user, places in places_of.items():
        count = min(int(settings.test_fraction * len(places) + 0.5), len(places) - 1)
        shuffled = key.child(user).numpy().permutation(places)
        tested.update(shuffled[:count].tolist())
    return {
        "train": [image for place, image in enumerate(listed) if place not in tested],
        "test": [image for place, image in enumerate(listed) if place in tested],
    }


def _require_each_once(images: list[_Image]) -> None:
    """Refuse two lines that are one image, which might be trained and tested on."""
    first_of: dict[tuple[int, int], _Image] = {}
    for image in images:
        first = first_of.setdefault(image.device_and_number, image)
        if first is not image:
            raise DataError(
                f"{image.where}: {image.path} is also the image in {first.where}, "
                "expected each image once in all lists; leave out one of the lines"
            )


def _digest(images: Images) -> str:
    digest = hashlib.sha256()
    for split, part in images.items():
        for one in part:
            # A device may have another number after a restart.
            state = (one.path, one.num_bytes, one.modified_ns)
            line = (split, one.user, one.class_name, *state)
            digest.update(f"{line!r}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
