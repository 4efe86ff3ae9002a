"""Read LEAF's JSON files one user at a time."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
Decode: TypeAlias = Callable[[list[Any], list[Any]], tuple[NDArray[Any], NDArray[Any]]]
"""Converts a user's lists ``x`` and ``y`` to inputs and labels."""


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
    try:
        values = np.asarray(x, dtype=np.float64)
        labels = np.asarray(y)
    except (ValueError, TypeError) as error:
        raise DataError(f"x or y holds other values than numbers: {error}") from error
    if len(x) > 0 and values.shape[1:] != (_NUM_PIXELS,):
        raise DataError(
            f"found images of shape {values.shape[1:]}, expected {_NUM_PIXELS} numbers"
        )
    if len(y) > 0 and (labels.dtype.kind not in "iu" or labels.ndim != 1):
        raise DataError(f"found labels of {labels.dtype}, expected whole numbers")
    # Negated, so that NaN counts as wrong.
    for kind, array, most in (("pixels", values, 1), ("labels", labels, 61)):
        if not np.all((array >= 0) & (array <= most)):
            raise DataError(
                f"{kind} go from {array.min():g} to {array.max():g}; expected 0 to "
                f"{most}"
            )
    pixels = np.rint(values * 255).astype(np.uint8)
    return pixels.reshape(-1, *PIXELS_SHAPE), labels.astype(np.int64)


def decode_text(
    x: list[Any], y: list[Any], unknown: UnknownCharacters
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Decode windows of 80 characters and next characters; count unknown characters."""
    for name, texts, length in (("x", x, WINDOW), ("y", y, 1)):
        if any(not isinstance(text, str) or len(text) != length for text in texts):
            raise DataError(f"{name}: expected texts of {length} characters")
    following = "".join(y)
    unknown.count(following)
    windows = encode("".join(x)).reshape(-1, 1, 1, WINDOW)
    return windows, encode(following).astype(np.int64)


def read_users(path: Path, decode: Decode) -> Iterator[User]:
    """Yield the users of a file one at a time, in the order of ``user_data``."""
    ijson = import_extra("ijson", "leaf", "reading LEAF's files")
    num_users = 0
    try:
        with path.open("rb") as file:
            for name, content in ijson.kvitems(file, "user_data", use_float=True):
                num_users += 1
                yield parse_user(path, name, content, decode)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]  # a drawing of the place follows
        reason = f"{reason}; if the file is cut off or damaged, make it again"
        raise DataError(
            f"{path} cannot be read as JSON: {encoding_problem(path) or reason}"
        ) from error
    if num_users == 0:
        raise DataError(f"{path} has no user_data; expected a file made by LEAF")


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
