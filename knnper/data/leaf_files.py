"""Read LEAF's JSON files one user at a time."""

import contextlib
import itertools
import json
import logging
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from knnper.data.cache import CENTRAL_SPLITS, CentralSplit, state_of_files
from knnper.data.characters import UnknownCharacters, encode
from knnper.data.csv_files import encoding_problem
from knnper.data.folders import (
    folders_in,
    is_folder,
    list_folder,
    no_folder_reason,
    require_reachable,
)
from knnper.data.split_names import is_split_name
from knnper.errors import DataError, warn_once
from knnper.process import import_extra

_LOG = logging.getLogger(__name__)
_LAYOUT = (
    "expected ROOT/train/*.json and ROOT/test/*.json, or ROOT/all_data/*.json, in "
    "data.root or in its folder data"
)
PIXELS_SHAPE = (28, 28, 1)
WINDOW = 80
_NUM_PIXELS = 28 * 28
_NAMED_AT_MOST = 3
Decode: TypeAlias = Callable[[list[Any], list[Any]], tuple[NDArray[Any], NDArray[Any]]]
"""Converts a user's lists ``x`` and ``y`` to inputs and labels."""
_DEEPEST = 100
"""Allowed nesting of brackets; LEAF's files have four levels."""
_MARK = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)
_OF_NUMBERS = b"0123456789.,- \n"
"""Most characters of a file of images; removed before the search for brackets."""


@dataclass(frozen=True)
class LeafFiles:
    """The files of one data set below ``root``, sorted by name."""

    root: Path
    divided: Mapping[CentralSplit, tuple[Path, ...]]
    whole: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Hash all relative paths, sizes and times of modification."""
        files = itertools.chain(self.whole, *self.divided.values())
        return state_of_files(files, self.root)


def find_leaf_files(root: Path) -> LeafFiles:
    """Find the files below ``root``, or else below ``root/data``.

    A split made by LEAF has precedence over ``all_data`` and over files in ``root``
    itself.
    """
    if reason := no_folder_reason(root):
        raise DataError(f"{root} {reason}; {_LAYOUT}")
    for base in (root, root / "data"):
        divided = {split: _json_files(base / split) for split in CENTRAL_SPLITS}
        empty = [base / split for split, files in divided.items() if not files]
        if len(empty) == 1:
            raise DataError(
                f"there are no .json files in {empty[0]}, but there are in the other "
                f"split; {_LAYOUT}"
            )
        if not empty:
            others = [name for name in folders_in(base) if is_split_name(name)]
            for name in sorted(set(others) - set(CENTRAL_SPLITS)):
                warn_once(
                    _LOG, f"{base}: found {name} beside train and test; it is not read"
                )
            return LeafFiles(base, divided, ())
        whole = _json_files(base / "all_data") or _json_files(base)
        if whole:
            return LeafFiles(base, {}, whole)
    raise DataError(f"there are no .json files of LEAF in {root}; {_LAYOUT}")


def _json_files(folder: Path) -> tuple[Path, ...]:
    """List the JSON files of a folder that may be missing; raise for broken links."""
    if not os.path.lexists(folder):
        return ()
    entries = [entry for entry in list_folder(folder) if not is_folder(entry)]
    for entry in entries:
        require_reachable(entry)
    paths = (Path(entry.path) for entry in entries)
    return tuple(path for path in paths if path.suffix.lower() == ".json")


class User(NamedTuple):
    """A user and its samples in one file."""

    name: str
    inputs: NDArray[np.uint8]  # uint8, shape (n, height, width, channels)
    labels: NDArray[np.int64]  # int64, shape (n,)

    def take(self, chosen: NDArray[np.bool_]) -> "User":
        """Return the user with the chosen samples only."""
        return User(self.name, self.inputs[chosen], self.labels[chosen])


def decode_images(x: list[Any], y: list[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Decode FEMNIST: images, lists of 784 numbers from 0 to 1 (white), and labels."""
    _require_kind("x", x, (list,), "lists of numbers")
    _require_length(x, _NUM_PIXELS, "numbers of an image")
    _require_kind("y", y, (int,), "whole numbers")
    try:
        values = np.asarray(x, dtype=np.float64)
    except (ValueError, TypeError):
        values = np.full(1, np.nan)
    labels = np.asarray(y, dtype=np.int64)
    if not np.isfinite(values).all():
        for image in x:
            _require_kind("x", image, (int, float), "lists of numbers")
    for kind, array, most in (("pixels", values, 1), ("labels", labels, 61)):
        if not np.all((array >= 0) & (array <= most)):
            raise DataError(
                f"{kind} go from {array.min():g} to {array.max():g}; expected 0 to "
                f"{most}"
            )
    pixels = np.rint(values * 255).astype(np.uint8)
    return pixels.reshape(-1, *PIXELS_SHAPE), labels


def decode_text(
    x: list[Any], y: list[Any], unknown: UnknownCharacters
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Decode windows of 80 characters and next characters; count unknown characters."""
    for name, texts in (("x", x), ("y", y)):
        _require_kind(name, texts, (str,), "texts")
    _require_length(x, WINDOW, "characters of a text")
    _require_length(y, 1, "characters of a label")
    following = "".join(y)
    unknown.count(following)
    windows = encode("".join(x)).reshape(-1, 1, 1, WINDOW)
    return windows, encode(following).astype(np.int64)


def _require_kind(
    name: str, values: Iterable[Any], kinds: tuple[type, ...], expected: str
) -> None:
    for value in values:
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, kinds):
            shown = json.dumps(value, ensure_ascii=False)[:40]
            raise DataError(f"in {name} found {shown}, expected {expected}")


def _require_length(values: Iterable[Any], expected: int, unit: str) -> None:
    wrong = {len(value) for value in values} - {expected}
    if wrong:
        raise DataError(f"found {min(wrong)} {unit}; expected {expected}")


@dataclass(frozen=True)
class _Listing:
    """The lists of users in a file; other keys are ignored."""

    users: tuple[str, ...]
    num_samples: tuple[Annotated[int, Field(ge=0)], ...]


def read_users(path: Path, decode: Decode) -> Iterator[User]:
    """Yield the users of a file one at a time, in the order of ``user_data``.

    At the end, the lists ``users`` and ``num_samples`` are compared with the users
    read. Users without samples may be missing in the lists, since LEAF leaves them out.
    """
    ijson = import_extra("ijson", "leaf", "reading LEAF's files")
    counts: dict[str, int] = {}
    header: dict[str, Any] = {}
    try:
        with _opened(path) as file:
            for name, content in ijson.kvitems(file, "user_data", use_float=True):
                user = parse_user(path, name, content, decode)
                counts[name] = len(user.labels)
                yield user
        for key in ("users", "num_samples"):
            # LEAF writes both before the users, so only the beginning is read again.
            with _opened(path) as file:
                header[key] = next(ijson.items(file, key), None)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (ijson.JSONError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]  # a drawing of the place follows
        reason = f"{reason}; if the file is cut off or damaged, make it again"
        raise DataError(
            f"{path} cannot be read as JSON: {encoding_problem(path) or reason}"
        ) from error
    _require_agreement(path, _parse_listing(path, header), counts)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator["_DepthLimitedFile"]:
    """Open a file after its byte order mark, if it has one."""
    with path.open("rb") as file:
        file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        yield _DepthLimitedFile(path, file)


class _DepthLimitedFile:
    """A JSON file that raises a `DataError` if brackets are nested too deeply.

    ijson keeps a path of names for each level, so memory grows with the square of the
    depth: a damaged file of 200 kB would fill it.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._depth = 0
        self._is_in_text = False

    def read(self, size: int) -> bytes:
        """Read the next bytes and count their brackets."""
        part = self._file.read(size)
        while part.endswith(b"\\") and (next_byte := self._file.read(1)):
            part += next_byte  # keep a backslash and the escaped byte together
        for mark in _MARK.findall(part.translate(None, _OF_NUMBERS)):
            if mark == b'"':
                self._is_in_text = not self._is_in_text
            elif not self._is_in_text and len(mark) == 1:
                self._depth += 1 if mark in b"[{" else -1
                if self._depth > _DEEPEST:
                    raise DataError(
                        f"{self._path} has brackets nested more than {_DEEPEST} deep; "
                        "expected a file made by LEAF"
                    )
        return part


def parse_user(path: Path, name: str, content: Any, decode: Decode) -> User:
    """Decode the samples of a user; raise a `DataError` that names file and user."""
    lists: list[Any] = (
        [content.get(key) for key in "xy"] if isinstance(content, dict) else []
    )
    try:
        if len(lists) < 2 or not all(isinstance(values, list) for values in lists):
            raise DataError("found no object with the lists x and y")
        inputs, labels = decode(*lists)
        if len(inputs) != len(labels):
            raise DataError(
                f"x has {len(inputs)} samples and y {len(labels)}; expected as many"
            )
    except DataError as error:
        raise DataError(f"{path}: user {name!r}: {error}") from error
    return User(name, inputs, labels)


def _require_agreement(
    path: Path, listed: Mapping[str, int], counts: Mapping[str, int]
) -> None:
    wrong = [
        f"user {name!r} has {counts.get(name, 0)} samples and is listed with "
        f"{listed.get(name, 0)}"
        for name in dict.fromkeys((*listed, *counts))
        if counts.get(name, 0) != listed.get(name, 0)
    ]
    if wrong:
        num_more = len(wrong) - _NAMED_AT_MOST
        remainder = f" and {num_more} more" if num_more > 0 else ""
        raise _disagreement(path, ", ".join(wrong[:_NAMED_AT_MOST]) + remainder)


def _parse_listing(path: Path, header: Mapping[str, Any]) -> Mapping[str, int]:
    """Parse the number of samples of each listed user."""
    try:
        listing = TypeAdapter(_Listing).validate_python(header)
    except ValidationError as error:
        raise DataError(
            f"{path}: expected lists users (texts) and num_samples (whole numbers) "
            f"beside user_data: {error.errors()[0]['msg']}"
        ) from error
    num_users, num_counts = len(listing.users), len(listing.num_samples)
    if num_users != num_counts:
        raise _disagreement(path, f"{num_users} users, {num_counts} in num_samples")
    listed = dict(zip(listing.users, listing.num_samples, strict=True))
    if len(listed) < num_users:
        raise _disagreement(path, f"{num_users} users, of which {len(listed)} differ")
    return listed


def _disagreement(path: Path, difference: str) -> DataError:
    return DataError(
        f"{path} does not agree with itself: {difference}; make the file again with "
        "LEAF"
    )
