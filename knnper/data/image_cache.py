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
_MOST_FORMS = 3
# Longer than a tick of the clocks that file systems take their times from.
_TICK_NS = 50_000_000
Decoded: TypeAlias = tuple[NDArray[np.uint8], Mapping[int, str]]
"""Images (m, height, width, channels), and why others, by position, have none."""


class _UnreadableFilesError(Exception):
    """Some files cannot be decoded, so that no entry is made."""


def cached_images(
    folder: Path,
    paths: Sequence[str],
    form: Sequence[object],
    shape: tuple[int, ...],
    decode: Callable[[], Decoded],
) -> Decoded:
    """Return what ``decode`` makes of a site's files, from the cache where it is there.

    An entry in ``folder`` belongs to the path, size and times of *each* of the site's
    files, and to the ``form``: what else decides on the images. When a file is new,
    gone or another, all entries are removed; otherwise the three that were last used
    are kept. Images of which some cannot be read are not kept: the reason may lie
    outside of the files. What is returned can be written to without changing the entry.
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
        # Let time pass until another change would be told by another time.
        left = changed_ns + _TICK_NS - time.time_ns()
        if 0 < left <= _TICK_NS:
            time.sleep(left / 1e9)
        decoded.append(decode())
        images, unreadable = decoded[0]
        if unreadable:
            raise _UnreadableFilesError
        # Not into a map: on a full disc that would kill the process.
        np.save(entry / "images.npy", images)
        sync_to_disc(entry / "images.npy")
        sync_to_disc(entry)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        kept = fill_once(folder / f"{listing}-{digest}", folder / "lock", read, fill)
        return decoded[0] if decoded else kept
    except _UnreadableFilesError:
        return decoded[0]
    except (OSError, UnwritableCacheError) as error:
        _LOG.warning("images are decoded without a cache: %s", error)
        return decoded[0] if decoded else decode()


def _state_of(paths: Sequence[str]) -> tuple[str, int]:
    """Return a digest of the state of all files, and when the last one changed."""
    digest, changed_ns = hashlib.sha256(), 0
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - 50,000 files
        except (OSError, ValueError):
            digest.update(f"{path}\0none\0".encode("utf-8", "surrogateescape"))
            continue
        # A file that was moved over another may have the same size and time of
        # modification, but was changed by the move.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        line = f"{path}\0{status.st_size}\0{times}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
        changed_ns = max(changed_ns, status.st_ctime_ns)
    return digest.hexdigest()[:32], changed_ns


def _remove_unused(new: Path, listing: str) -> None:
    """Remove what is of no use any more beside a new entry, and leave room for it."""
    entries = {one for one in new.parent.iterdir() if one.is_dir()} - {new}
    useful = [
        one
        for one in entries
        if one.name.startswith(listing) and not one.name.endswith(UNFINISHED)
    ]
    useful.sort(key=lambda one: one.stat().st_mtime_ns)
    for one in entries.difference(useful[-(_MOST_FORMS - 1) :]):
        shutil.rmtree(one, ignore_errors=True)
