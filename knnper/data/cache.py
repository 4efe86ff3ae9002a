"""Decode a data set once; afterwards every process memory-maps the result."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from knnper.config.errors import DataError
from knnper.data.cache_entry import (
    FORMAT_VERSION,
    Contents,
    EntryWriter,
    read_entry,
    sync_to_disc,
)
from knnper.data.dataset import Dataset

_LOG = logging.getLogger(__name__)

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
    found = _read_if_sound(entry)
    if found is not None:
        return found
    with _exclusive(entry):
        return _read_if_sound(entry) or _rebuild(entry, name, build)


def _fingerprint(source: Source) -> str:
    text = json.dumps([FORMAT_VERSION, dict(source)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_if_sound(entry: Path) -> Dataset | None:
    if not entry.exists():
        return None
    try:
        return read_entry(entry)
    except (OSError, ValueError, EOFError, KeyError) as error:
        _LOG.warning("%s is damaged (%s) and will be decoded again", entry, error)
        return None


def _rebuild(entry: Path, name: str, build: Build) -> Dataset:
    """Make the entry; only the holder of its lock may."""
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        writer = EntryWriter(unfinished)
        writer.seal(name, build(writer))
        shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_to_disc(entry.parent)
    return read_entry(entry)


@contextlib.contextmanager
def _exclusive(entry: Path) -> Iterator[None]:
    """Hold the entry's lock; the system releases it when a process dies."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_name(f"{entry.name}.lock").open("w")
    except OSError as error:
        raise DataError(
            f"the data cache cannot be written ({error}); point KNNPER_CACHE to a "
            "folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
