"""The cache of a site's decoded image files."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.data.cache import UnwritableCacheError, fill_once, map_array
from knnper.files import UNFINISHED, sync_to_disc

_LOG = logging.getLogger(__name__)
# Input forms (sizes, formats) of one listing of files that are kept.
_MAX_FORMS = 3
# Longer than the resolution of file systems' clocks.
_TICK_NS = 50_000_000

Decoded: TypeAlias = tuple[NDArray[np.uint8], Mapping[int, str]]
"""Decoded images (m, height, width, channels), and the errors of others by position."""


class _UnreadableFilesError(Exception):
    """Raised inside a new entry to abandon it: some files cannot be decoded."""


def cached_images(
    folder: Path,
    paths: Sequence[str],
    form: Sequence[object],
    shape: tuple[int, ...],
    decode: Callable[[], Decoded],
) -> Decoded:
    """Return a site's decoded image files from the cache, or decode and cache them.

    The key of an entry in ``folder`` consists of the path, size and times of all files
    and of ``form``: everything else that determines the images, such as their size.
    When a file is added, removed or changed, all older entries are deleted; else the
    three last used entries are kept. Nothing is cached if some images cannot be read,
    since the reason may lie outside of the files. Writing to the returned images does
    not change the entry.
    """
    listing, changed_ns = _state_of(paths)
    digest = hashlib.sha256(json.dumps(form).encode()).hexdigest()[:32]
    decoded: list[Decoded] = []

    def read(entry: Path) -> Decoded:
        images = map_array(entry / "images.npy", shape, "c")
        if images.dtype != np.uint8:
            raise ValueError(f"expected uint8, found {images.dtype}")
        with contextlib.suppress(OSError):
            os.utime(entry)
        return images, {}

    def fill(entry: Path) -> None:
        _remove_unused(entry, listing)
        # Wait until a later change of a file would get a different time.
        wait_ns = changed_ns + _TICK_NS - time.time_ns()
        if 0 < wait_ns <= _TICK_NS:
            time.sleep(wait_ns / 1e9)
        decoded.append(decode())
        images, unreadable = decoded[0]
        if unreadable:
            raise _UnreadableFilesError
        # Not memory-mapped: on a full disk, writing to a map kills the process.
        np.save(entry / "images.npy", images)
        sync_to_disc(entry / "images.npy")
        sync_to_disc(entry)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        cached = fill_once(folder / f"{listing}-{digest}", folder / "lock", read, fill)
        return decoded[0] if decoded else cached
    except _UnreadableFilesError:
        return decoded[0]
    except (OSError, UnwritableCacheError) as error:
        _LOG.warning("images are decoded without a cache: %s", error)
        return decoded[0] if decoded else decode()


def _state_of(paths: Sequence[str]) -> tuple[str, int]:
    """Hash the paths, sizes and times of files; return the last change, too."""
    digest, changed_ns = hashlib.sha256(), 0
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - 50,000 files
        except (OSError, ValueError):
            digest.update(f"{path}\0none\0".encode("utf-8", "surrogateescape"))
            continue
        # The time of change (ctime) reveals a file that was moved over another of
        # the same size and time of modification.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        line = f"{path}\0{status.st_size}\0{times}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
        changed_ns = max(changed_ns, status.st_ctime_ns)
    return digest.hexdigest()[:32], changed_ns


def _remove_unused(new: Path, listing: str) -> None:
    """Delete entries of other listings, and all but the last used of this one."""
    entries = {entry for entry in new.parent.iterdir() if entry.is_dir()} - {new}
    useful = [
        entry
        for entry in entries
        if entry.name.startswith(listing) and not entry.name.endswith(UNFINISHED)
    ]
    useful.sort(key=lambda entry: entry.stat().st_mtime_ns)
    for entry in entries.difference(useful[-(_MAX_FORMS - 1) :]):
        shutil.rmtree(entry, ignore_errors=True)
