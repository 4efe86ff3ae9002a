"""Decode a data set once; afterwards every process memory-maps the result."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from knnper.config.errors import DataError
from knnper.data.cache_entry import (
    FORMAT_VERSION,
    Contents,
    EntryWriter,
    read_entry,
)
from knnper.data.dataset import Dataset
from knnper.data.whole_entry import alone, make_entry, read_if_sound

Source: TypeAlias = Mapping[str, str | int | float | None]
Build: TypeAlias = Callable[[EntryWriter], Contents]


def cache_root() -> Path:
    """Return the folder of all decoded data sets.

    ``KNNPER_CACHE``, or ``knnper`` in the user's cache folder (``XDG_CACHE_HOME``, or
    ``~/.cache``).
    """
    chosen = os.environ.get("KNNPER_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "knnper"


def cached_dataset(name: str, source: Source, build: Build) -> Dataset:
    """Return the data set from the cache, decoding it first where it is not there.

    Parameters
    ----------
    name
        The data set's name in the catalogue.
    source
        Everything that decides what is decoded; another source is another entry.
    build
        Writes the arrays and returns the rest. Called at most once at a time on one
        cache folder, whatever the number of processes.

    Raises
    ------
    DataError
        If the cache folder cannot be written, or whatever ``build`` raises.

    Notes
    -----
    An entry is made beside its final place and renamed when it is complete and on the
    disc, so a half-written one is never seen. A damaged one is replaced.
    """
    entry = cache_root() / f"{name}-{_fingerprint(source)}"
    found = read_if_sound(entry, read_entry)
    if found is not None:
        return found
    with _exclusive(entry):
        found = read_if_sound(entry, read_entry)
        if found is not None:
            return found
        make_entry(entry, lambda folder: _fill(folder, name, build))
        return read_entry(entry)


def _fingerprint(source: Source) -> str:
    text = json.dumps([FORMAT_VERSION, dict(source)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fill(folder: Path, name: str, build: Build) -> None:
    writer = EntryWriter(folder)
    writer.seal(name, build(writer))


@contextlib.contextmanager
def _exclusive(entry: Path) -> Iterator[None]:
    """Hold the entry's lock."""
    with contextlib.ExitStack() as stack:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(entry.with_name(f"{entry.name}.lock")))
        except OSError as error:
            raise DataError(
                f"the data cache cannot be written ({error}); point KNNPER_CACHE to a "
                "folder that can"
            ) from error
        yield
