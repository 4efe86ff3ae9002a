"""LEAF's FEMNIST and Shakespeare, from its JSON files or from the Hugging Face Hub."""

import hashlib
import importlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from knnper.data.cache import Contents, EntryWriter, Split, cache_root, cached_dataset
from knnper.data.dividing import DividingSettings, mark_tested
from knnper.data.examples import DataFormat, Dataset
from knnper.data.text import CHARACTER_NAMES, UnknownCharacters, encode
from knnper.errors import DataError

_LOG = logging.getLogger(__name__)

_LEAST_CHUNK = 1 << 22

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_SPACE = re.compile(rb"[ \t\r\n]*")

_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*")

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'

# What is open is closed by its own kind of bracket, so that only this kind is counted.
# A quote is matched alone where the text that begins there is not all in memory.
_TOKENS: Mapping[bytes, re.Pattern[bytes]] = MappingProxyType(
    {
        b"{": re.compile(_STRING + rb'|\{|\}|"', re.DOTALL),
        b"[": re.compile(_STRING + rb'|\[|\]|"', re.DOTALL),
        b'"': re.compile(_STRING + rb'|"', re.DOTALL),
    }
)

_DEPTHS: Mapping[bytes, int] = MappingProxyType({b"{": 1, b"[": 1, b"}": -1, b"]": -1})


class JsonStream:
    """One JSON text in a file, of which only the value at hand is in memory.

    Where values end is found by counting brackets outside of texts; whether they are
    valid is for those to say who parse them. All methods raise a `DataError` where the
    file ends too early, or something else than what is asked for comes next.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._held = b""
        self._at = 0
        self._held_from = 0
        self._read_on()
        if self._held.startswith(_BYTE_ORDER_MARK):
            self._at = len(_BYTE_ORDER_MARK)

    def members(self) -> Iterator[str]:
        """Yield the names in the next object; the caller reads the values."""
        self._expect(b"{")
        if self._skip(b"}"):
            return
        while True:
            if self._peek() != b'"':
                raise self._unexpected("a name in double quotes")
            name = str(self.parsed())
            self._expect(b":")
            yield name
            if not self._skip(b","):
                break
        self._expect(b"}")

    def value(self) -> bytes:
        """Return the value that comes next, as it stands in the file."""
        return self._take(_end_of_value)

    def flat_object(self) -> bytes:
        """Return the object that comes next, which may not hold other objects.

        Several times as fast as `value`, since only quotes are looked at.
        """
        if self._peek() != b"{":
            raise self._unexpected("an object")
        return self._take(_end_of_flat_object)

    def parsed(self) -> Any:
        """Return the value that comes next as Python objects."""
        self._peek()
        began = self._held_from + self._at
        try:
            return json.loads(self.value())
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"this is no JSON ({error})", began) from error

    def require_end(self) -> None:
        """Refuse a file that goes on."""
        if self._peek():
            raise self._unexpected("the end of the file")

    def _expect(self, byte: bytes) -> None:
        if not self._skip(byte):
            raise self._unexpected(repr(byte.decode()))

    def _skip(self, byte: bytes) -> bool:
        """Step over ``byte`` if it comes next."""
        found = self._peek() == byte
        self._at += found
        return found

    def _peek(self) -> bytes:
        """Return the next byte that is no white space; none at the end."""
        while True:
            self._at = _matched(_SPACE, self._held, self._at)
            if self._at < len(self._held) or not self._read_on():
                return self._held[self._at : self._at + 1]

    def _take(self, end_of: Callable[[bytes, int], int | None]) -> bytes:
        """Return what ends where ``end_of`` says, which is asked until it is held."""
        first = self._peek()
        while (end := end_of(self._held, self._at)) is None:
            if self._read_on():
                continue
            if first in _TOKENS:
                raise self._wrong(f"{self._shown()} has no end")
            end = len(self._held)
            break
        taken = self._held[self._at : end]
        self._at = end
        return taken

    def _read_on(self) -> bool:
        """Hold more of the file; return whether there was any."""
        rest = self._held[self._at :]
        # As much again as there is, so that a long value is not searched many times.
        more = self._file.read(max(_LEAST_CHUNK, len(rest)))
        self._held_from += self._at
        self._held, self._at = rest + more, 0
        return bool(more)

    def _unexpected(self, expected: str) -> DataError:
        what = self._shown() if self._peek() else "the end of the file"
        return self._wrong(f"expected {expected}, found {what}")

    def _shown(self) -> str:
        return repr(self._held[self._at : self._at + 20].decode("utf-8", "replace"))

    def _wrong(self, message: str, position: int | None = None) -> DataError:
        at = self._held_from + self._at if position is None else position
        return DataError(
            f"{self._path} cannot be read as JSON: at byte {at} {message}; if the file "
            "is cut off or damaged, make it again"
        )


def _end_of_value(held: bytes, at: int) -> int | None:
    """Return where a text, list, object or scalar ends; None where more is needed."""
    tokens = _TOKENS.get(held[at : at + 1])
    if tokens is None:
        end = _matched(_SCALAR, held, at)
        return end if end < len(held) else None
    depth = 0
    for token in tokens.finditer(held, at):
        if token[0] == b'"':
            return None
        depth += _DEPTHS.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None


def _end_of_flat_object(held: bytes, at: int) -> int | None:
    start, in_text = at, False
    while (end := held.find(b"}", start) + 1) > 0:
        part = held[start:end]
        if b"\\" in part:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"")
        in_text ^= part.count(b'"') % 2 == 1
        if not in_text:
            return end
        start = end
    return None


def _matched(pattern: re.Pattern[bytes], held: bytes, start: int) -> int:
    """Return where a pattern that always matches ends."""
    found = pattern.match(held, start)
    return start if found is None else found.end()


_SPLITS: tuple[Split, ...] = ("train", "test")

_LAYOUT = (
    "expected ROOT/train/*.json and ROOT/test/*.json, or ROOT/all_data/*.json, in "
    "data.root or in its folder data"
)


@dataclass(frozen=True)
class LeafFiles:
    """The files of one data set below ``root``, in the order of their names.

    Attributes
    ----------
    divided
        The files of both splits, where LEAF has made them.
    whole
        Else those of all users' samples.
    """

    root: Path
    divided: Mapping[Split, tuple[Path, ...]]
    whole: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Return a digest of all relative paths, sizes and times of modification."""
        digest = hashlib.sha256()
        for path in itertools.chain(self.whole, *self.divided.values()):
            status = path.stat()
            name = path.relative_to(self.root)
            line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def find_leaf_files(root: Path) -> LeafFiles:
    """Return the files below ``root``, or else those below ``root/data``.

    Where there is a split that LEAF has made, it is taken; else ``all_data``, or the
    files that lie in ``root`` itself.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; {_LAYOUT}")
    for base in (root, root / "data"):
        divided = {split: _json_files(base / split) for split in _SPLITS}
        for split, files in divided.items():
            if not files and any(divided.values()):
                raise DataError(
                    f"there are no .json files in {base / split}, but there are in the "
                    f"other split; {_LAYOUT}"
                )
        if any(divided.values()):
            return LeafFiles(base, divided, ())
        whole = _json_files(base / "all_data") or _json_files(base)
        if whole:
            return LeafFiles(base, {}, whole)
    raise DataError(f"there are no .json files of LEAF in {root}; {_LAYOUT}")


def _json_files(folder: Path) -> tuple[Path, ...]:
    found = (one for one in folder.glob("*.json") if not one.name.startswith("."))
    return tuple(sorted(one for one in found if one.is_file()))


PIXELS_SHAPE = (28, 28, 1)

NUM_CHARACTERS = 62

WINDOW = 80

_NUM_PIXELS = 28 * 28


@dataclass(frozen=True, eq=False)
class Samples:
    """What one user has.

    Attributes
    ----------
    inputs
        uint8, shape (n, height, width, channels).
    labels
        int64, shape (n,).
    """

    inputs: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.bool_]) -> "Samples":
        """Return the chosen ones of the n samples."""
        return Samples(self.inputs[chosen], self.labels[chosen])


class SamplesError(Exception):
    """A user's samples are not what they should be."""


Decode: TypeAlias = Callable[[bytes], Samples]
"""Takes ``{"x": [...], "y": [...]}`` and may raise a `SamplesError`."""


def image_decoder() -> Decode:
    """Return what reads the images of FEMNIST.

    In ``x`` an image is a list of 784 numbers in [0, 1], where 1 is white paper; in
    ``y`` it has a label from 0 to 61.
    """
    pixels = _Field("x", _images, "lists of numbers", (int, float))
    return _decoder(pixels, _Field("y", _image_labels, "whole numbers", (int,)))


def text_decoder(unknown: UnknownCharacters | None = None) -> Decode:
    """Return what reads windows of 80 characters and what comes next, and counts that.

    ``unknown`` counts the characters in ``y``.
    """
    counted = UnknownCharacters() if unknown is None else unknown

    def next_characters(y: Any) -> NDArray[np.int64]:
        return _next_characters(y, counted)

    windows = _Field("x", _windows, "texts", (str,))
    return _decoder(windows, _Field("y", next_characters, "texts", (str,)))


class _Field(NamedTuple):
    """One of a user's two lists: its name, what makes an array of it, what it holds."""

    name: str
    read: Callable[[Any], NDArray[Any]]
    expected: str
    kinds: tuple[type, ...]

    def array(self, found: Any) -> NDArray[Any]:
        """Return the list as an array; a `SamplesError` says what does not belong."""
        try:
            return self.read(found)
        except (ValueError, TypeError) as error:
            odd = _first_odd(found.as_list(), self.kinds)
            what = str(error) if odd is None else f"found {odd}"
            raise SamplesError(
                f"its samples are not as expected: in {self.name} {what}, expected "
                f"{self.expected}"
            ) from error


def _decoder(inputs: _Field, labels: _Field) -> Decode:
    simdjson = _simdjson()
    # One for all users: making one takes as long as reading a user's samples.
    parser = simdjson.Parser()

    def lists(text: bytes) -> Iterator[Any]:
        """Yield x and y, lists that make Python objects only when asked for."""
        document = parser.parse(text)
        if not isinstance(document, simdjson.Object):
            raise SamplesError("its samples are no object with x and y")
        for name in ("x", "y"):
            found = document.get(name)
            if not isinstance(found, simdjson.Array):
                raise SamplesError(f"there is no list {name} among its samples")
            yield found

    def decode(text: bytes) -> Samples:
        try:
            x, y = lists(text)
        except (ValueError, TypeError) as error:
            raise SamplesError(
                f"its samples are not as expected: {error}; a user may hold lists only"
            ) from error
        samples = Samples(inputs.array(x), labels.array(y))
        if len(samples.inputs) != len(samples.labels):
            raise SamplesError(
                f"x has {len(samples.inputs)} samples and y {len(samples.labels)}; "
                "expected as many"
            )
        return samples

    return decode


def _simdjson() -> Any:
    try:
        return importlib.import_module("simdjson")
    except ModuleNotFoundError as error:
        raise DataError(
            "reading LEAF's files needs the package pysimdjson, which is not "
            "installed; pip install 'knnper[leaf]'"
        ) from error


def _images(x: Any) -> NDArray[np.uint8]:
    _require_lengths({len(image) for image in x}, _NUM_PIXELS, "numbers of an image")
    values = np.frombuffer(x.as_buffer(of_type="d"), dtype=np.float64)
    if np.any((values < 0) | (values > 1)):
        raise SamplesError(
            f"pixels go from {values.min():g} to {values.max():g}; expected 0 to 1"
        )
    return np.rint(values * 255).astype(np.uint8).reshape(-1, *PIXELS_SHAPE)


def _image_labels(y: Any) -> NDArray[np.int64]:
    labels = np.frombuffer(y.as_buffer(of_type="i"), dtype=np.int64)
    if np.any((labels < 0) | (labels >= NUM_CHARACTERS)):
        raise SamplesError(
            f"labels go from {labels.min()} to {labels.max()}; expected 0 to "
            f"{NUM_CHARACTERS - 1}"
        )
    return labels


def _windows(x: Any) -> NDArray[np.uint8]:
    texts = x.as_list()
    _require_lengths(set(map(len, texts)), WINDOW, "characters of a text")
    return encode("".join(texts)).reshape(-1, 1, 1, WINDOW)


def _next_characters(y: Any, unknown: UnknownCharacters) -> NDArray[np.int64]:
    characters = y.as_list()
    _require_lengths(set(map(len, characters)), 1, "characters of a label")
    text = "".join(characters)
    unknown.count(text)
    return encode(text).astype(np.int64)


def _first_odd(values: Iterable[Any], kinds: tuple[type, ...]) -> str | None:
    """Return the first value, however deep in lists, that is of another kind."""
    for value in values:
        if isinstance(value, list):
            odd = _first_odd(value, kinds)
            if odd is not None:
                return odd
        # Python takes true and false for numbers.
        elif isinstance(value, bool) or not isinstance(value, kinds):
            return json.dumps(value, ensure_ascii=False)
    return None


def _require_lengths(found: set[int], expected: int, what: str) -> None:
    wrong = sorted(found - {expected})
    if wrong:
        raise SamplesError(f"found {wrong[0]} {what}; expected {expected}")


_NAMED_AT_MOST = 3


class User(NamedTuple):
    """A user and what it has in one file."""

    name: str
    samples: Samples


@dataclass(frozen=True)
class _Listing:
    """What a file says of its users, besides their samples; the rest is passed over."""

    users: tuple[str, ...]
    num_samples: tuple[Annotated[int, Field(ge=0)], ...]


def read_users(path: Path, decode: Decode) -> Iterator[User]:
    """Yield the users of a file, one after the other, as they come in ``user_data``.

    At the end the file's lists ``users`` and ``num_samples`` are compared with what was
    there, wherever in the file they are. A user that is not listed and has no samples
    is one that LEAF has left out. Other keys, such as ``hierarchies``, are passed over.
    """
    header: dict[str, Any] = {}
    counts: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            stream = JsonStream(file, path)
            for key in stream.members():
                if key == "user_data":
                    for user in _users(stream, path, decode):
                        counts[user.name] = len(user.samples)
                        yield user
                elif key in ("users", "num_samples"):
                    header[key] = stream.parsed()
                else:
                    stream.value()
            stream.require_end()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    _require_agreement(path, _listed(path, header), counts)


def _users(stream: JsonStream, path: Path, decode: Decode) -> Iterator[User]:
    for name in stream.members():
        try:
            yield User(name, decode(stream.flat_object()))
        except SamplesError as error:
            raise DataError(f"{path}: user {name!r}: {error}") from error


def _require_agreement(
    path: Path, listed: Mapping[str, int], counts: Mapping[str, int]
) -> None:
    missing = [name for name in listed if name not in counts and listed[name] > 0]
    if missing:
        raise _disagreement(path, f"users without data in user_data: {_few(missing)}")
    extra = [name for name, count in counts.items() if count and name not in listed]
    if extra:
        raise _disagreement(path, f"data of users that are not listed: {_few(extra)}")
    for name, expected in listed.items():
        found = counts.get(name, 0)
        if found != expected:
            raise _disagreement(
                path, f"num_samples is {expected} for user {name!r}, who has {found}"
            )


def _listed(path: Path, header: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the number of samples of each user that the file lists."""
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


def _disagreement(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} does not agree with itself: {found}; make the file again with LEAF"
    )


def _few(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMED_AT_MOST]))
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown


Part = tuple[Split, User]
"""What one user trains on, or is tested on."""

WRITTEN_CHARACTERS = tuple(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)


@dataclass(frozen=True, kw_only=True)
class LeafSettings(DividingSettings, DataFormat):
    """Where the files are, and how they are divided.

    Attributes
    ----------
    root
        The folder that LEAF has filled: with ``train`` and ``test``, whose split is
        then taken as it is, or else with ``all_data``, which is divided as the other
        settings say. Its parent, in which it is called ``data``, will do, and so will
        ``all_data`` itself.
    """

    name = "leaf_femnist"
    title = "FEMNIST (LEAF)"
    summary = "EMNIST by writer, from LEAF's files: 3,550 writers, 62 classes"

    root: str

    def load(self) -> Dataset:
        """Return LEAF's FEMNIST: images of shape (28, 28, 1), 62 classes, by writer.

        A `DataError` names the file and the user that is damaged or does not agree.
        """

        def write(writer: EntryWriter, files: LeafFiles) -> Contents:
            write_parts(writer, _parts(files, image_decoder(), self))
            return Contents(WRITTEN_CHARACTERS)

        return _load("leaf_femnist", self, write)


@dataclass(frozen=True, kw_only=True)
class LeafTextSettings(LeafSettings):
    """Where the files are, and how each role's windows are divided.

    Attributes
    ----------
    split
        ``time`` tests on the last windows, ``random`` on any, as in the paper: windows
        overlap, so that what is tested on is then trained on in part.
    """

    name = "leaf_shakespeare"
    title = "Shakespeare (LEAF)"
    summary = "the next character, by speaking role, from LEAF's files"

    split: Literal["random", "time"] = "time"

    def load(self) -> Dataset:
        """Return LEAF's Shakespeare: windows of 80 characters, by speaking role."""

        def write(writer: EntryWriter, files: LeafFiles) -> Contents:
            unknown = UnknownCharacters()
            write_parts(writer, _parts(files, text_decoder(unknown), self))
            unknown.require_few(self.root)
            return Contents(CHARACTER_NAMES, dtype="token")

        return _load("leaf_shakespeare", self, write)


def write_parts(writer: EntryWriter, parts: Iterable[Part]) -> None:
    """Store each part; users are numbered as they come, those without samples not."""
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
        yield from divided(_loading_users(files.whole, decode), settings)
    for split, paths in files.divided.items():
        for user in _loading_users(paths, decode):
            yield split, user


def _loading_users(paths: Iterable[Path], decode: Decode) -> Iterator[User]:
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


_NAME_ON_HUB = "flwrlabs/femnist"


@dataclass(frozen=True, kw_only=True)
class FemnistHubSettings(DividingSettings, DataFormat):
    """Where the downloaded files are kept, and how each writer's images are divided.

    Attributes
    ----------
    root
        The folder of the downloaded files; null is ``downloads`` in the cache folder.
    """

    name = "femnist_hub"
    title = "FEMNIST (Hub)"
    summary = "the same, downloaded from the Hugging Face Hub through flwr-datasets"

    root: str | None = None

    def folder(self) -> Path:
        """Return the absolute ``root``."""
        if self.root is None:
            return cache_root() / "downloads"
        return Path(self.root).expanduser().absolute()

    def load(self) -> Dataset:
        """Return FEMNIST: images of shape (28, 28, 1), 62 classes, by writer.

        It is downloaded if it is not in ``root``, 814,277 images.

        Raises
        ------
        DataError
            If it cannot be downloaded, or the package flwr-datasets is not installed.
        """

        def build(writer: EntryWriter) -> Contents:
            users = _writers(_all_rows(self.folder()))
            write_parts(writer, divided(users, self))
            return Contents(WRITTEN_CHARACTERS)

        # What the Hub holds under one name does not depend on where it is kept.
        source = asdict(self)
        del source["root"]
        return cached_dataset("femnist_hub", source, build)


def _all_rows(folder: Path) -> Any:
    """Return a table of the columns image, writer_id and character."""
    try:
        package = importlib.import_module("flwr_datasets")
    except ModuleNotFoundError as error:
        raise DataError(
            "femnist_hub needs the package flwr-datasets, which is not installed; "
            "pip install 'knnper[hub]', or give LEAF's own files to leaf_femnist"
        ) from error
    try:
        # Unshuffled, a writer's rows lie together and are read fast.
        federated = package.FederatedDataset(
            dataset=_NAME_ON_HUB, partitioners={}, shuffle=False, cache_dir=str(folder)
        )
        return federated.load_split("train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{_NAME_ON_HUB} cannot be loaded into {folder}: {error}; check the "
            "connection, or give LEAF's own files to leaf_femnist"
        ) from error


def _writers(rows: Any) -> Iterator[User]:
    """Yield the writers in the order of their names, each with all of its images."""
    names, owner = np.unique(np.array(rows["writer_id"][:]), return_inverse=True)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    for name, places in zip(names, np.split(by_owner, ends[:-1]), strict=True):
        yield User(str(name), _samples(rows[places.tolist()]))


def _samples(columns: Any) -> Samples:
    images = [np.asarray(image.convert("L")) for image in columns["image"]]
    return Samples(
        np.stack(images).reshape(-1, *PIXELS_SHAPE),
        np.asarray(columns["character"], dtype=np.int64),
    )
