"""One of LEAF's files: users and the samples of each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from knnper.config.errors import DataError
from knnper.data.leaf.json_stream import JsonStream
from knnper.data.leaf.samples import Decode, Samples, SamplesError

_NAMED_AT_MOST = 3


@dataclass(frozen=True, eq=False)
class User:
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
    is one that LEAF has left out.

    Parameters
    ----------
    path
        ``{"users": [...], "num_samples": [...], "user_data": {NAME: {"x": [...], "y":
        [...]}, ...}}``; other keys, such as ``hierarchies``, are passed over.
    decode
        Reads a user's samples.

    Raises
    ------
    DataError
        If the file cannot be read, or its parts do not agree.
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
    _require_agreement(path, header, counts)


def _users(stream: JsonStream, path: Path, decode: Decode) -> Iterator[User]:
    for name in stream.members():
        try:
            yield User(name, decode(stream.flat_object()))
        except SamplesError as error:
            raise DataError(f"{path}: user {name!r}: {error}") from error


def _require_agreement(
    path: Path, header: Mapping[str, Any], counts: Mapping[str, int]
) -> None:
    listed = _listed(path, header)
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
